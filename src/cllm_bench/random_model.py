"""GGUF files with realistic shapes and random weights, for speed tests without a model file.

Piece by piece, so that an 8B file takes little memory; always the same bytes, so that one that is there is used again.
"""

from __future__ import annotations

import math
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from cllm.machine import mib
from cllm.models.registry import cache_dir
from cllm_bench.errors import BenchError
from cllm_bench.kernels.layered import LayeredShape, Vector
from cllm_bench.kernels.shapes import Mix, matrices, pick, weight_bytes
from cllm_bench.random_vocabulary import add_vocabulary

_MADE = 2
"""Counts up when files come out differently, so that old ones are not taken for new ones."""
_ROOM_FOR_HEADER = 32 << 20

Say = Callable[[str], None]


def random_file(shape_name: str, type_name: str, say: Say = lambda line: None) -> Path:
    """The file of a shape and a type, in the cache; written if it is not there."""
    shape, mix = pick(shape_name, type_name)
    target = cache_dir() / "bench" / f"random-{shape_name}-{type_name}-{_MADE}.gguf"
    if target.is_file():
        return target
    part = target.with_suffix(".part")  # written over if a writer was killed
    needed = weight_bytes(shape, mix) + _ROOM_FOR_HEADER
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if needed > free:
            raise BenchError(
                f"{shape_name} as {type_name} takes {mib(needed)}, and {target.parent} has {mib(free)} left: "
                "make room, take a smaller shape, or name another place with CLLM_CACHE_DIR"
            )
        write(part, shape, mix, f"random {shape_name} {type_name}", say)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise BenchError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def write(target: Path, shape: LayeredShape, mix: Mix, name: str, say: Say = lambda line: None) -> Path:
    writer = GGUFWriter(target, shape.architecture)
    _add_metadata(writer, shape, name)
    whole = list(matrices(shape, mix))
    for vector in shape.vectors:
        writer.add_tensor_info(vector.name, vector.shape, np.dtype(np.float32), 4 * math.prod(vector.shape))
    for matrix in whole:
        byte_shape, kind = (matrix.rows, matrix.bytes // matrix.rows), GGMLQuantizationType(matrix.type.number)
        writer.add_tensor_info(matrix.name, byte_shape, np.dtype(np.uint8), matrix.bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for vector in shape.vectors:
        writer.write_tensor_data(_drawn(vector))
    assert writer.fout is not None
    out = writer.fout[0]
    written, total = 0, sum(matrix.bytes for matrix in whole)
    for matrix in whole:
        for piece in matrix.pieces():
            out.write(piece.data)
        writer.write_padding(out, matrix.bytes)
        before, written = written, written + matrix.bytes
        if 10 * before // total != 10 * written // total:
            say(f"writing {name}: {written / total:.0%} of {mib(total)}")
    writer.close()
    return target


def _drawn(vector: Vector) -> NDArray[np.float32]:
    random = np.random.default_rng(zlib.crc32(vector.name.encode()))
    return random.uniform(vector.low, vector.high, vector.shape).astype(np.float32)


def _add_metadata(writer: GGUFWriter, shape: LayeredShape, name: str) -> None:
    writer.add_name(name)
    sizes = {"embedding_length": shape.n_embd, "block_count": len(shape.layers), "vocab_size": shape.n_vocab}
    for key, value in {**sizes, **shape.keys}.items():
        writer.add_key_value(f"{shape.architecture}.{key}", value, *_types(value))
    add_vocabulary(writer, shape.n_vocab)


def _types(value: Any) -> tuple[GGUFValueType, GGUFValueType | None]:
    """The type of a value, and of what is in it."""
    if isinstance(value, list):
        return GGUFValueType.ARRAY, _types(value[0])[0]
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    return kinds.get(type(value), GGUFValueType.STRING), None
