"""GGUF files taken apart, so that any part can be made wrong and the file be put together again."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

U8, I32, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 5, 4, 6, 7, 8, 9, 10
_FORMS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: Any) -> bytes:
    return struct.pack("<I", kind) + (text(value) if kind == STRING else struct.pack(_FORMS[kind], value))


def array(kind: int, values: list[Any], count: int | None = None) -> bytes:
    """`count`: what the file says, if that is not true."""
    items = b"".join(text(v) if kind == STRING else struct.pack(_FORMS[kind], v) for v in values)
    return struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count) + items


@dataclass(frozen=True)
class TensorEntry:
    name: bytes
    shape: tuple[int, ...]
    kind: int
    offset: int

    def encoded(self) -> bytes:
        dimensions = struct.pack(f"<I{len(self.shape)}Q", len(self.shape), *self.shape)
        return text(self.name) + dimensions + struct.pack("<IQ", self.kind, self.offset)


@dataclass(frozen=True)
class Parts:
    """A file in pieces: `pairs` are keys and encoded values, `data` is all behind the header."""

    pairs: tuple[tuple[bytes, bytes], ...]
    tensors: tuple[TensorEntry, ...]
    data: bytes
    counts: tuple[int, int] | None = None
    """Tensors and pairs, if the file is to say something else."""

    def encoded(self) -> bytes:
        n_tensors, n_pairs = self.counts or (len(self.tensors), len(self.pairs))
        header = struct.pack("<4sIQQ", b"GGUF", 3, n_tensors, n_pairs)
        header += b"".join(text(key) + value for key, value in self.pairs)
        header += b"".join(tensor.encoded() for tensor in self.tensors)
        return header + bytes(-len(header) % 32) + self.data

    def with_pair(self, index: int, value: bytes) -> Parts:
        pairs = list(self.pairs)
        pairs[index] = (pairs[index][0], value)
        return replace(self, pairs=tuple(pairs))

    def with_tensor(self, index: int, tensor: TensorEntry) -> Parts:
        tensors = list(self.tensors)
        tensors[index] = tensor
        return replace(self, tensors=tuple(tensors))


def take_apart(content: bytes) -> Parts:
    """A sound file of version 3 with an alignment of 32."""
    n_tensors, n_pairs = struct.unpack_from("<QQ", content, 8)
    at = 24

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return content[at - size : at]

    def take_text() -> bytes:
        return take(*struct.unpack("<Q", take(8)))

    pairs = []
    for _ in range(n_pairs):
        key, start = take_text(), at
        _skip_value(take, take_text)
        pairs.append((key, content[start:at]))
    tensors = []
    for _ in range(n_tensors):
        name = take_text()
        (dimensions,) = struct.unpack("<I", take(4))
        shape = struct.unpack(f"<{dimensions}Q", take(8 * dimensions))
        tensors.append(TensorEntry(name, shape, *struct.unpack("<IQ", take(12))))
    return Parts(tuple(pairs), tuple(tensors), content[-(-at // 32) * 32 :])


def _skip_value(take: Any, take_text: Any) -> None:
    (kind,) = struct.unpack("<I", take(4))
    if kind == STRING:
        take_text()
    elif kind == ARRAY:
        kind, count = struct.unpack("<IQ", take(12))
        for _ in range(count if kind == STRING else 0):
            take_text()
        take(0 if kind == STRING else count * struct.calcsize(_FORMS[kind]))
    else:
        take(struct.calcsize(_FORMS[kind]))


VALUES: dict[str, bytes] = {
    "u8 0": scalar(U8, 0),
    "i32 -1": scalar(I32, -1),
    "u32 most": scalar(U32, 2**32 - 1),
    "u64 most": scalar(U64, 2**64 - 1),
    "f32 nan": scalar(F32, float("nan")),
    "f32 inf": scalar(F32, float("inf")),
    "bool": scalar(BOOL, 1),
    "no text": scalar(STRING, ""),
    "lines": scalar(STRING, "two\nlines\r\x1b[2J\x00\x85\u2028end"),
    "no UTF-8": scalar(STRING, b"\xff\xfe\xc3("),
    "long text": scalar(STRING, "x" * 100_000),
    "text claims more": struct.pack("<IQ", STRING, 2**40) + b"abc",
    "empty": array(U32, []),
    "numbers": array(U32, [1, 2, 3]),
    "many numbers": array(U32, [0] * 400),
    "floats": array(F32, [float("nan"), -0.0, float("inf")] * 200),
    "texts": array(STRING, ["a b", "two\nlines", "", b"\xff"]),
    "many texts": array(STRING, [f"t {i}" for i in range(400)]),
    "the same text": array(STRING, ["same"] * 320),
    "long texts": array(STRING, ["y" * 5000] * 320),
    "bools": array(BOOL, [0, 1, 2]),
    "claims more": array(U32, [1], count=2**61),
    "claims more texts": array(STRING, ["a"], count=2**40),
    "array of arrays": struct.pack("<IIQ", ARRAY, ARRAY, 1) + array(U32, [1])[4:],
    "unknown type": struct.pack("<I", 99),
    "unknown elements": struct.pack("<IIQ", ARRAY, 99, 1),
}


def value_mutants(parts: Parts) -> Iterator[tuple[str, bytes]]:
    """Every value replaced by one of every other kind."""
    for index, (key, _) in enumerate(parts.pairs):
        for name, value in VALUES.items():
            yield f"{key.decode()} = {name}", parts.with_pair(index, value).encoded()


def key_mutants(parts: Parts) -> Iterator[tuple[str, bytes]]:
    """Every key twice, missing, and by another name; and keys that files seldom have."""
    for index, (key, value) in enumerate(parts.pairs):
        before, after = parts.pairs[:index], parts.pairs[index + 1 :]
        yield f"{key.decode()} twice", replace(parts, pairs=(*parts.pairs, (key, value))).encoded()
        yield f"{key.decode()} missing", replace(parts, pairs=before + after).encoded()
        yield f"{key.decode()} renamed", replace(parts, pairs=(*before, (key + b"\n\xff", value), *after)).encoded()
    for extra in (
        "split.count",
        "general.alignment",
        "llama.rope.scaling.type",
        "llama.expert_count",
        "llama.vocab_size",
    ):
        for name, value in VALUES.items():
            yield f"{extra} = {name}", replace(parts, pairs=(*parts.pairs, (extra.encode(), value))).encoded()
    for alignment in (1, 3, 16, 33, 64, 4096, 2**31):
        pair = (b"general.alignment", scalar(U32, alignment))
        yield f"alignment {alignment}", replace(parts, pairs=(*parts.pairs, pair)).encoded()


def tensor_mutants(parts: Parts) -> Iterator[tuple[str, bytes]]:
    """Every tensor elsewhere, of another shape, type or name; counts that are not true."""
    for index, tensor in enumerate(parts.tensors):
        other = parts.tensors[index - 1]
        changes = {
            "in another's place": replace(tensor, offset=other.offset),
            "half in another": replace(tensor, offset=tensor.offset + 32),
            "unaligned": replace(tensor, offset=tensor.offset + 1),
            "far away": replace(tensor, offset=2**63),
            "past 2^64": replace(tensor, offset=2**64 - 32),
            "with no dimension": replace(tensor, shape=()),
            "with a dimension of 0": replace(tensor, shape=(0, *tensor.shape)),
            "with 5 dimensions": replace(tensor, shape=(1, 1, 1, 1, 1)),
            "with 2^32 dimensions": replace(tensor, shape=tensor.shape * 40),
            "vast": replace(tensor, shape=(2**63, 2**63)),
            "turned round": replace(tensor, shape=tensor.shape[::-1]),
            "of type f16": replace(tensor, kind=1),
            "of type 4": replace(tensor, kind=4),
            "of type 2^32-1": replace(tensor, kind=2**32 - 1),
            "by another's name": replace(tensor, name=other.name),
            "by a strange name": replace(tensor, name=b"a\n\x1b\xff"),
        }
        for name, changed in changes.items():
            yield f"{tensor.name.decode()} {name}", parts.with_tensor(index, changed).encoded()
    for counts in ((0, 0), (2**64 - 1, 2**64 - 1), (1, len(parts.pairs)), (len(parts.tensors), 2**32)):
        yield f"counts {counts}", replace(parts, counts=counts).encoded()
    for more in (-1, 1):
        yield f"{more} tensors", replace(parts, counts=(len(parts.tensors) + more, len(parts.pairs))).encoded()
        yield f"{more} pairs", replace(parts, counts=(len(parts.tensors), len(parts.pairs) + more)).encoded()
