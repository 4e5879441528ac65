"""The Q4_0 file, llama.cpp's fastest type, of a model that is quantised already."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from cllm.backends.llama_cpp.library import load_library
from cllm.models.dequantise import DEQUANTISED, dequantised_rows
from cllm.models.gguf import GGUFModel, TensorFile

_FLOATS = ctypes.POINTER(ctypes.c_float)


def requantise(model: Path, target: Path) -> None:
    """As llama.cpp's own tool does it: matrices as Q4_0, but the one that gives the logits as Q6_K."""
    source = GGUFModel.open(model)
    reader = GGUFReader(source.path)
    types = {name: _new_type(source, name) for name in source.tensors}
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    with part.open("wb") as out, TensorFile(source) as file:
        with source.path.open("rb") as original:
            out.write(original.read(int(reader.tensors[0].field.offset)))
        _write_directory(source, types, out, reader.alignment)
        for name, kind in types.items():
            _pad(out, reader.alignment)
            for piece in _pieces(file, source, name, kind):
                out.write(piece.tobytes())
    part.replace(target)


def _write_directory(source: GGUFModel, types: dict[str, int], out: IO[bytes], alignment: int) -> None:
    offset = 0
    for name, kind in types.items():
        shape, encoded = source.tensors[name].shape, name.encode()
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        out.write(struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset))
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        offset += -(-int(np.prod(shape)) // values * size // alignment) * alignment


def _new_type(source: GGUFModel, name: str) -> int:
    info = source.tensors[name]
    if len(info.shape) != 2 or info.type not in DEQUANTISED or info.shape[0] % 32:
        return info.type
    if name == ("output.weight" if "output.weight" in source.tensors else "token_embd.weight"):
        return int(GGMLQuantizationType.Q8_0 if info.shape[0] % 256 else GGMLQuantizationType.Q6_K)
    return int(GGMLQuantizationType.Q4_0)


def _pieces(file: TensorFile, source: GGUFModel, name: str, kind: int) -> Iterator[NDArray[np.uint8]]:
    if kind == source.tensors[name].type:
        yield file.read(name)
        return
    quantise = load_library().api.ggml_quantize_chunk
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    for rows in dequantised_rows(file, source, name):
        rows = np.ascontiguousarray(rows)
        piece = np.empty(rows.size // values * size, np.uint8)
        quantise(kind, rows.ctypes.data_as(_FLOATS), piece.ctypes.data, 0, *rows.shape, None)
        yield piece


def _pad(out: IO[bytes], alignment: int) -> None:
    out.write(bytes(-out.tell() % alignment))
