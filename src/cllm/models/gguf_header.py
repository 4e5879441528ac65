"""Reads the header of a GGUF file: metadata and tensor directory, not the weights.

The package `gguf` has a reader, too, but it takes seconds for 50,000 tokens and trusts the file's counts.
This one checks every count against the remaining bytes before it allocates anything. It does not map the file: if
another process truncates it, reading a mapped page kills the process, while a short read is an error.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from cllm.machine import install_packages

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_HEADER_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    kind: np.dtype(name)
    for kind, name in (
        (0, "<u1"), (1, "<i1"), (2, "<u2"), (3, "<i2"), (4, "<u4"), (5, "<i4"),
        (6, "<f4"), (7, "?"), (10, "<u8"), (11, "<i8"), (12, "<f8"),
    )
}  # fmt: skip
_HEADER = struct.Struct("<4sIQQ")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# The minimum size of an entry; counts that cannot fit into the rest of the file are refused at once.
_MIN_PAIR = 8 + 4 + 1
_MIN_TENSOR = 8 + 4 + 4 + 8
_MIN_STRING = 8


class DamagedError(Exception):
    """What is wrong with the file; the message does not name it."""


class TensorInfo(NamedTuple):
    """An entry of the tensor directory; its bytes are inside the file and overlap with no other tensor's."""

    type: int
    """GGML's type number."""
    shape: tuple[int, ...]
    """As in the file: the row length first."""
    offset: int
    """From the start of the file."""
    size: int
    """In bytes."""


class HeaderReader:
    """Reads the file as far as needed."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._data = bytearray()
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        """Metadata and tensors. Every problem is a `DamagedError`."""
        tensors, pairs = self._read_counts()
        metadata = self._read_metadata(pairs)
        return metadata, self._read_tensors(tensors, metadata)

    def _read_counts(self) -> tuple[int, int]:
        if self._size < _HEADER.size:
            raise DamagedError(f"has only {self._size} bytes, so it is not a GGUF file")
        self._require(_HEADER.size)
        magic, version, tensors, pairs = _HEADER.unpack_from(self._data)
        self._at = _HEADER.size
        if magic != _MAGIC:
            raise DamagedError(f"is not a GGUF file (it begins with {magic!r}, not {_MAGIC!r})")
        if version not in _VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            reason = "is big-endian" if big_endian else f"has version {version}"
            raise DamagedError(f"{reason}; only little-endian GGUF files of version 2 or 3 are supported")
        return tensors, pairs

    # -- metadata ----------------------------------------------------------------------------------------------

    def _read_metadata(self, count: int) -> dict[str, Any]:
        self._check_fits(count, _MIN_PAIR, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._read_string()
            if key in metadata:
                raise DamagedError(f"is damaged: the metadata key {short(key)} occurs twice")
            metadata[key] = self._read_value(key)
        return metadata

    def _read_value(self, key: str) -> Any:
        kind = self._read_number(_U32)
        if kind == _STRING:
            return self._read_string()
        if kind == _ARRAY:
            return self._read_array(key)
        if kind not in _SCALARS:
            raise DamagedError(f"is damaged: the metadata key {short(key)} has the unknown type {kind}")
        return self._read_numbers(_SCALARS[kind], 1, key)[0].item()

    def _read_array(self, key: str) -> Any:
        kind, count = self._read_number(_U32), self._read_number(_U64)
        if kind == _STRING:
            self._check_fits(count, _MIN_STRING, f"strings in {short(key)}")
            return self._read_strings(count)
        if kind not in _SCALARS:
            raise DamagedError(f"is damaged: the metadata array {short(key)} has elements of the unknown type {kind}")
        return self._read_numbers(_SCALARS[kind], count, key)

    # -- tensors -----------------------------------------------------------------------------------------------

    def _read_tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
        """Every tensor must be inside the file; a partial download fails here."""
        self._check_fits(count, _MIN_TENSOR, "tensors")
        _check_whole(metadata.get("split.count", 1))
        tensors: dict[str, TensorInfo] = {}
        for _ in range(count):
            name = self._read_string()
            if name in tensors:
                raise DamagedError(f"is damaged: the tensor {short(name)} occurs twice")
            tensors[name] = self._read_tensor(name)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0:
            raise DamagedError(f"is damaged: general.alignment is {short(alignment)}")
        start = -(-self._at // alignment) * alignment
        for name, tensor in tensors.items():
            end = start + tensor.offset + tensor.size
            if end > self._size:
                raise DamagedError(f"is truncated: tensor {short(name)} ends at byte {end}, the file has {self._size}")
            if tensor.offset % alignment:
                where = f"{tensor.offset}, not a multiple of the alignment {alignment}"
                raise DamagedError(f"is damaged: the offset of tensor {short(name)} is {where}")
            tensors[name] = tensor._replace(offset=start + tensor.offset)
        _check_apart(tensors)
        return tensors

    def _read_tensor(self, name: str) -> TensorInfo:
        """What follows a tensor's name; the offset counts from the start of the tensor data."""
        dimensions = self._read_number(_U32)
        if dimensions > _MAX_DIMENSIONS:
            raise DamagedError(f"is damaged: tensor {short(name)} has {dimensions} dimensions")
        shape = tuple([self._read_number(_U64) for _ in range(dimensions)])
        if 0 in shape:
            raise DamagedError(f"is damaged: tensor {short(name)} has a dimension of 0")
        kind, offset = self._read_number(_U32), self._read_number(_U64)
        if kind not in GGML_QUANT_SIZES:
            raise DamagedError(
                f"has a tensor, {short(name)}, of the unknown type {kind}: it is damaged, or too new for the installed "
                f"package gguf ({install_packages('--upgrade', 'gguf')})"
            )
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        row = shape[0] if shape else 1
        if row % per_block:
            raise DamagedError(f"is damaged: tensor {short(name)} has rows of {row}, not whole blocks of {per_block}")
        return TensorInfo(kind, shape, offset, math.prod(shape) // per_block * block_bytes)

    # -- bytes -------------------------------------------------------------------------------------------------

    def _read_string(self) -> str:
        length = self._read_number(_U64)
        start, stop = self._at, self._at + length
        if stop > self._size:
            raise DamagedError(f"is truncated: a string in its header ends at byte {stop}, the file has {self._size}")
        self._require(stop)
        self._at = stop
        return self._data[start:stop].decode("utf-8", "replace")

    def _read_strings(self, count: int) -> list[str]:
        """Vocabularies have a hundred thousand strings: those already in memory are read without a call for each."""
        strings: list[str] = []
        unpack, data, have, at = _U64.unpack_from, self._data, len(self._data), self._at
        for _ in range(count):
            start = at + 8
            if start <= have and (stop := start + unpack(data, at)[0]) <= have:
                strings.append(data[start:stop].decode("utf-8", "replace"))
                at = stop
                continue
            self._at = at
            strings.append(self._read_string())
            data, have, at = self._data, len(self._data), self._at
        self._at = at
        return strings

    def _read_number(self, form: struct.Struct) -> int:
        stop = self._at + form.size
        self._require(stop)
        value: int = form.unpack_from(self._data, self._at)[0]
        self._at = stop
        return value

    def _read_numbers(self, kind: np.dtype[Any], count: int, key: str) -> np.ndarray[Any, Any]:
        self._check_fits(count, kind.itemsize, f"numbers in {short(key)}")
        start, stop = self._at, self._at + count * kind.itemsize
        self._require(stop)
        self._at = stop
        return np.frombuffer(bytes(self._data[start:stop]), kind)

    def _check_fits(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self._size - self._at:
            raise DamagedError(
                f"is truncated or damaged: it claims {count} {what}, more than fit into its {self._size} bytes"
            )

    def _require(self, stop: int) -> None:
        """Read the bytes up to `stop`."""
        have = len(self._data)
        if stop <= have:
            return
        if stop > self._size:
            raise DamagedError(f"is truncated: it ends after {self._size} bytes, inside its header")
        if stop > _MAX_HEADER_BYTES:
            raise DamagedError(f"is damaged: its header claims more than {_MAX_HEADER_BYTES >> 20} MiB")
        wanted = min(max(stop, have + _CHUNK_BYTES), self._size)
        self._data += self._file.read(wanted - have)
        if len(self._data) < stop:
            raise DamagedError("was truncated while it was being read")


def _check_whole(split_count: object) -> None:
    if type(split_count) is not int:
        raise DamagedError(f"is damaged: split.count is {short(split_count)}")
    if split_count not in (0, 1):
        raise DamagedError(f"is one of {split_count} parts; merge them into one file first (llama-gguf-split --merge)")


def _check_apart(tensors: Mapping[str, TensorInfo]) -> None:
    """Tensors that overlap: at least one of them is wrong."""
    by_offset = sorted(tensors.items(), key=lambda item: item[1].offset)
    for (name, tensor), (other, next_tensor) in pairwise(by_offset):
        if tensor.offset + tensor.size > next_tensor.offset:
            raise DamagedError(
                f"is damaged: its tensors {short(name)} and {short(other)} overlap: the first ends at byte "
                f"{tensor.offset + tensor.size}, the second begins at {next_tensor.offset}"
            )


def short(value: object, limit: int = 60) -> str:
    """A value from a file, shortened to one line."""
    if isinstance(value, (list, np.ndarray)):
        value = list(value[:limit]) if isinstance(value, list) else value[:limit].tolist()
    elif isinstance(value, str):
        value = value[: limit + 1]
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
