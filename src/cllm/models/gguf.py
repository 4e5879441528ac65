"""Reads the header of a GGUF file: metadata and tensor directory, never the weights.

The package `gguf` has a reader too, but it takes seconds for a 50,000-token vocabulary and trusts the counts it finds.
This one walks the header once, checks every count against the bytes that are left before it allocates anything, and
turns whatever is wrong with a file into one `ModelError` line.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from cllm.errors import ModelError
from cllm.models.shape import ModelShape

T = TypeVar("T")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_SIZE = 2**31 - 1  # of any number in a model's shape

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

# The fewest bytes an entry can take; counts that could not fit in the rest of the file are refused at once.
_MIN_PAIR = 8 + 4 + 1
_MIN_TENSOR = 8 + 4 + 4 + 8
_MIN_STRING = 8


class _DamagedError(Exception):
    """What is wrong with the file, without its name."""


class TensorInfo(NamedTuple):
    """One entry of the tensor directory; its bytes lie inside the file."""

    type: int
    """GGML's number of it."""
    shape: tuple[int, ...]
    """As in the file: the length of a row first."""
    offset: int
    """From the start of the file."""
    size: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """The header of one model file: metadata and tensor directory."""

    path: Path
    name: str
    shape: ModelShape
    size_bytes: int
    metadata: Mapping[str, Any] = field(repr=False)
    """Scalars as Python values, arrays of strings as lists, arrays of numbers as numpy arrays."""
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    def get(self, key: str, default: T) -> T:
        """The value of `key`, which must be of the default's type (a `None` default takes any type)."""
        return _get(self.metadata, key, default, self.path)

    @classmethod
    def open(cls, path: Path) -> GGUFModel:
        """Read and check the header of `path`. Every problem is a `ModelError` that names the file."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < _HEADER.size:
                    raise _DamagedError(f"has only {size} bytes, so it is no GGUF model")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    metadata, tensors = _HeaderReader(data).read()
        except OSError as error:
            raise ModelError(
                f"{path}: cannot be read ({error.strerror or error}); give the path of a .gguf file"
            ) from error
        except _DamagedError as error:
            raise ModelError(f"{path}: {error}; fetch it again or give another .gguf file") from error
        name = _get(metadata, "general.name", "", path) or path.stem
        return cls(path, name, _read_shape(metadata, path), size, metadata, tensors)


class _HeaderReader:
    """A cursor over the file. Reading past the end raises `_DamagedError`."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        try:
            tensors, pairs = self._read_counts()
            metadata = self._read_metadata(pairs)
            return metadata, self._read_tensors(tensors, metadata)
        except struct.error as error:
            raise _DamagedError(f"is cut short: it ends after {self._size} bytes, inside its header") from error

    def _read_counts(self) -> tuple[int, int]:
        magic, version, tensors, pairs = _HEADER.unpack_from(self._data)
        self._at = _HEADER.size
        if magic != _MAGIC:
            raise _DamagedError(f"is no GGUF model (it begins with {magic!r}, not {_MAGIC!r})")
        if version not in _VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            reason = "big-endian" if big_endian else f"of version {version}"
            raise _DamagedError(f"is a GGUF file {reason}; only little-endian versions 2 and 3 can be read")
        return tensors, pairs

    def _read_metadata(self, count: int) -> dict[str, Any]:
        self._check_fits(count, _MIN_PAIR, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._read_string()
            if key in metadata:
                raise _DamagedError(f"is damaged: the metadata key {_short(key)} occurs twice")
            metadata[key] = self._read_value(key)
        return metadata

    def _read_value(self, key: str) -> Any:
        kind = self._read_number(_U32)
        if kind == _STRING:
            return self._read_string()
        if kind == _ARRAY:
            return self._read_array(key)
        if kind not in _SCALARS:
            raise _DamagedError(f"is damaged: the metadata key {_short(key)} has the unknown type {kind}")
        return self._read_numbers(_SCALARS[kind], 1, key)[0].item()

    def _read_array(self, key: str) -> Any:
        kind, count = self._read_number(_U32), self._read_number(_U64)
        if kind == _STRING:
            self._check_fits(count, _MIN_STRING, f"strings in {_short(key)}")
            return [self._read_string() for _ in range(count)]
        if kind not in _SCALARS:
            raise _DamagedError(f"is damaged: the metadata array {_short(key)} has elements of the unknown type {kind}")
        return self._read_numbers(_SCALARS[kind], count, key)

    def _read_tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
        """Every tensor's data must lie inside the file; a half-fetched file fails here."""
        self._check_fits(count, _MIN_TENSOR, "tensors")
        if metadata.get("split.count", 1) not in (0, 1):
            raise _DamagedError(
                f"is one of {metadata['split.count']} parts; merge them into one file first (llama-gguf-split --merge)"
            )
        tensors: dict[str, TensorInfo] = {}
        for _ in range(count):
            name = self._read_string()
            if name in tensors:
                raise _DamagedError(f"is damaged: the tensor {_short(name)} occurs twice")
            tensors[name] = self._read_tensor(name)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise _DamagedError(f"is damaged: general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        for name, tensor in tensors.items():
            end = start + tensor.offset + tensor.size
            if end > self._size:
                raise _DamagedError(
                    f"is cut short: tensor {_short(name)} ends at byte {end}, the file has {self._size}"
                )
            tensors[name] = tensor._replace(offset=start + tensor.offset)
        total = sum(tensor.size for tensor in tensors.values())
        if total > self._size:
            raise _DamagedError(
                f"is damaged: its tensors overlap, as they take {total} bytes and the file has {self._size}"
            )
        return tensors

    def _read_tensor(self, name: str) -> TensorInfo:
        """What follows a tensor's name, with its offset counted from the start of all tensor data."""
        dimensions = self._read_number(_U32)
        if dimensions > _MAX_DIMENSIONS:
            raise _DamagedError(f"is damaged: tensor {_short(name)} has {dimensions} dimensions")
        shape = tuple([self._read_number(_U64) for _ in range(dimensions)])
        if 0 in shape:
            raise _DamagedError(f"is damaged: tensor {_short(name)} has a dimension of 0")
        kind, offset = self._read_number(_U32), self._read_number(_U64)
        if kind not in GGML_QUANT_SIZES:
            raise _DamagedError(
                f"has a tensor, {_short(name)}, of the unknown type {kind}: either it is damaged, or too new for the "
                "installed package gguf (pip install -U gguf)"
            )
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        row = shape[0] if shape else 1
        if row % per_block:
            raise _DamagedError(f"is damaged: tensor {_short(name)} has rows of {row}, not whole blocks of {per_block}")
        return TensorInfo(kind, shape, offset, math.prod(shape) // per_block * block_bytes)

    def _read_string(self) -> str:
        start = self._at + 8
        stop = start + self._read_number(_U64)
        if stop > self._size:
            raise _DamagedError(f"is cut short: a string in its header ends at byte {stop}, the file has {self._size}")
        self._at = stop
        return self._data[start:stop].decode("utf-8", "replace")

    def _read_number(self, form: struct.Struct) -> int:
        value: int = form.unpack_from(self._data, self._at)[0]
        self._at += form.size
        return value

    def _read_numbers(self, kind: np.dtype[Any], count: int, key: str) -> np.ndarray[Any, Any]:
        self._check_fits(count, kind.itemsize, f"numbers in {_short(key)}")
        start, self._at = self._at, self._at + count * kind.itemsize
        return np.frombuffer(self._data[start : self._at], kind)

    def _check_fits(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self._size - self._at:
            raise _DamagedError(
                f"is cut short or damaged: it claims {count} {what}, more than its {self._size} bytes hold"
            )


def _get(metadata: Mapping[str, Any], key: str, default: T, path: Path) -> T:
    value = metadata.get(key)
    if value is None:
        return default
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if default is not None and type(value) is not type(default):
        found, wanted = type(value).__name__, type(default).__name__
        raise ModelError(f"{path}: the metadata key {key} is a {found}, not a {wanted}; fetch another .gguf file")
    return cast(T, value)


def _read_shape(metadata: Mapping[str, Any], path: Path) -> ModelShape:
    architecture = _get(metadata, "general.architecture", "", path)
    if not re.fullmatch(r"[\w.-]{1,64}", architecture):
        found = f"is {_short(architecture)}" if architecture else "is missing"
        raise ModelError(f"{path}: general.architecture {found}, so it is no language model; give another .gguf file")
    read = _size_reader(metadata, architecture, path)
    n_embd, n_heads = read("embedding_length", None), read("attention.head_count", None)
    tokens = _get(metadata, "tokenizer.ggml.tokens", cast("list[str]", []), path)
    return ModelShape(
        architecture=architecture,
        n_layers=read("block_count", None),
        n_embd=n_embd,
        n_heads=n_heads,
        n_kv_heads=read("attention.head_count_kv", n_heads),
        head_dim_k=read("attention.key_length", n_embd // n_heads),
        head_dim_v=read("attention.value_length", n_embd // n_heads),
        n_vocab=len(tokens) or read("vocab_size", None),
        context_length=read("context_length", None),
    )


def _size_reader(metadata: Mapping[str, Any], architecture: str, path: Path) -> Callable[[str, int | None], int]:
    def read(suffix: str, default: int | None) -> int:
        key = f"{architecture}.{suffix}"
        value = _get(metadata, key, cast(Any, None), path)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]  # one entry per layer, all the same
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{path}: the metadata key {key} is missing; give a complete .gguf model")
        if type(value) is not int or not 0 < value <= _MAX_SIZE:
            raise ModelError(
                f"{path}: the metadata key {key} is {_short(value)}, not a usable size; give another .gguf file"
            )
        return value

    return read


def _short(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
