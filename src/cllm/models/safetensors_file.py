"""Reads the header of a safetensors file: the location of its tensors. The weights are read later, piece by piece.

8 bytes   length of the header
header    {"name": {"dtype": "BF16", "shape": [576, 576], "data_offsets": [0, 663552]}, …}
data      the tensors, one after another, without gaps
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from cllm.errors import ModelError
from cllm.models.gguf_header import short
from cllm.models.json_file import FETCH_AGAIN, open_regular, parse_json
from cllm.models.unchanged_file import FileStamp, unreadable

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 8
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class StoredTensor(NamedTuple):
    """The location of a tensor; its bytes are inside the file and overlap with no other tensor's."""

    file: Path
    dtype: str
    """The format's own name."""
    shape: tuple[int, ...]
    offset: int
    """From the start of the file."""
    size: int
    """In bytes."""


def read_header(path: Path) -> tuple[FileStamp, dict[str, StoredTensor]]:
    """Checks everything against the file's size. Every problem is a `ModelError`."""
    try:
        with open_regular(path) as file:
            stamp = FileStamp.of(os.fstat(file.fileno()))
            header = _read_header_bytes(path, file, stamp.size)
    except OSError as error:
        raise unreadable(path, error, FETCH_AGAIN) from error
    first = _LENGTH_BYTES + len(header)
    entries = parse_json(header, path)
    entries.pop("__metadata__", None)
    tensors = {name: _read_entry(path, name, entry, first) for name, entry in entries.items()}
    _check_whole(path, tensors, first, stamp.size)
    return stamp, tensors


def _read_header_bytes(path: Path, file: BinaryIO, size: int) -> bytes:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
        raise _damaged(path, f"it has {size} bytes, which is less than its header")
    if length > _MAX_HEADER_BYTES:
        raise _damaged(path, f"its header claims {length} bytes")
    header = file.read(length)
    if len(header) < length:
        raise _damaged(path, "it was truncated while it was being read")
    return header


def _read_entry(path: Path, name: str, entry: Any, first: int) -> StoredTensor:
    what = f"the tensor {short(name)}"
    if not isinstance(entry, dict):
        raise _damaged(path, f"the entry of {what} is {short(entry)}")
    dtype, shape, offsets = entry.get("dtype"), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise _damaged(path, f"{what} has the unknown type {short(dtype)}")
    if shape is None or len(shape) > _MAX_DIMENSIONS:
        raise _damaged(path, f"{what} has the shape {short(entry.get('shape'))}")
    if offsets is None or len(offsets) != 2:
        raise _damaged(path, f"{what} has the offsets {short(entry.get('data_offsets'))}")
    size = math.prod(shape) * _BYTES[dtype]
    if offsets[1] - offsets[0] != size:
        raise _damaged(path, f"{what} has the offsets {short(offsets)}, but needs {size} bytes")
    return StoredTensor(path, dtype, tuple(shape), first + offsets[0], size)


def _sizes(value: Any) -> list[int] | None:
    """The value if it is a list of sizes, else None."""
    is_list = isinstance(value, list) and all(type(each) is int and 0 <= each < 2**62 for each in value)
    return value if is_list else None


def _check_whole(path: Path, tensors: dict[str, StoredTensor], first: int, size: int) -> None:
    """Tensors must not overlap or leave gaps, and must end where the file does."""
    end = first
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
        if tensor.offset != end:
            raise _damaged(path, f"the tensor {short(name)} begins at byte {tensor.offset}, not at {end}")
        end += tensor.size
    if end != size:
        raise _damaged(path, f"its tensors end at byte {end}, the file at {size}")


def _damaged(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path}: is not a complete safetensors file: {reason}; {FETCH_AGAIN}")
