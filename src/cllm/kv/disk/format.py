"""The bytes of a segment, the file in which the store keeps a run of a chain (or one saved sequence).

    +------------------+ 0
    | segment header   | one page: whose it is, and where in a chain it begins
    +------------------+ 4096
    | record header    | whole pages: names of the blocks, and a checksum of each
    | payload          | block after block, filled up with zeros to a whole page
    +------------------+
    | record header    | what was appended later
    | payload          |
    +------------------+

All numbers are little-endian. A header's last four bytes are the CRC-32 of all before them. A payload's piece (a block;
1 MiB of a sequence) has its CRC-32 in the record's header; that of the last piece covers the zeros after it as well.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from cllm.kv.disk.names import NAME_BYTES

PAGE = 4096
VERSION = 1
SEQUENCE_PIECE = 1 << 20
MOST_HEADER_BYTES = 16 << 20
SUFFIX = ".kv"
CRC_BYTES = 4

_SEGMENT_MAGIC, _RECORD_MAGIC = b"cLLM-KV\n", b"cLLM-run"
_SEGMENT = struct.Struct("<8sII32s16sQIQ32sI")
_RECORD = struct.Struct("<8sI16sQIIQQI")


class Kind(IntEnum):
    BLOCKS = 1
    """Consecutive blocks of a chain."""
    SEQUENCE = 2
    """One sequence that a backend saved, which can only be loaded whole."""


class DamagedError(Exception):
    """These bytes are not what the store writes."""


class OtherVersionError(Exception):
    """A segment of another version of the format: not to be used, and not damaged."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    fingerprint: bytes
    id: bytes
    kind: Kind
    block_bytes: int
    """Of one block; 0 for a sequence."""
    block_tokens: int
    first: int
    """The number in its chain of the first block here."""
    parent: bytes
    """The name of the block before it, or the chain's root."""
    about: Mapping[str, str | int]
    """The model in words, for who looks at the directory."""

    def encode(self) -> bytes:
        text = json.dumps(dict(self.about), ensure_ascii=True).encode()
        if len(text) > PAGE - _SEGMENT.size - CRC_BYTES:
            text = b"{}"
        fields = (self.fingerprint, self.id, self.block_bytes, self.block_tokens, self.first, self.parent, len(text))
        fixed = _SEGMENT.pack(_SEGMENT_MAGIC, VERSION, int(self.kind), *fields)
        return _sealed(fixed + text, PAGE)


def decode_segment_header(page: bytes) -> SegmentHeader:
    if len(page) < PAGE or page[:8] != _SEGMENT_MAGIC:
        raise DamagedError("it does not begin like a segment")
    if not _is_sealed(page):
        raise DamagedError("its header is damaged")
    _, version, kind, fingerprint, identity, size, tokens, first, parent, length = _SEGMENT.unpack_from(page)
    if version != VERSION:
        raise OtherVersionError(f"version {version} of the format")
    try:
        about = json.loads(page[_SEGMENT.size : _SEGMENT.size + length])
        return SegmentHeader(fingerprint, identity, Kind(kind), size, tokens, first, parent, dict(about))
    except ValueError as error:
        raise DamagedError("its header makes no sense") from error


@dataclass(frozen=True, slots=True)
class Record:
    """One append: names, and the checksums of the pieces that follow."""

    segment: bytes
    offset: int
    piece_bytes: int
    payload_bytes: int
    tokens: int
    """Sequences: how many tokens there are. The last name is that of all of them, the others of whole blocks."""
    names: tuple[bytes, ...]
    checksums: array[int]

    @property
    def header_bytes(self) -> int:
        return _header_bytes(len(self.names), len(self.checksums))

    @property
    def payload(self) -> int:
        """Where it begins."""
        return self.offset + self.header_bytes

    @property
    def end(self) -> int:
        return self.payload + whole_pages(self.payload_bytes)

    def piece_end(self, piece: int) -> int:
        """The offset up to which a piece's checksum goes; that of the last one goes to the record's end."""
        return self.end if piece == len(self.checksums) - 1 else self.payload + (piece + 1) * self.piece_bytes

    def whole_pieces(self, size: int) -> int:
        """Pieces that a file of `size` bytes has of this record."""
        if size >= self.end:
            return len(self.checksums)
        return min(max(0, (size - self.payload) // self.piece_bytes), len(self.checksums) - 1)

    def encode(self) -> bytes:
        fixed = _RECORD.pack(
            _RECORD_MAGIC, self.header_bytes, self.segment, self.offset, len(self.names), len(self.checksums),
            self.piece_bytes, self.payload_bytes, self.tokens,
        )  # fmt: skip
        return _sealed(fixed + b"".join(self.names) + _pack(self.checksums), self.header_bytes)


def record_header_bytes(page: bytes) -> int:
    """How long the header is that begins with this page; not yet checked in any other way."""
    if len(page) < PAGE or page[:8] != _RECORD_MAGIC:
        raise DamagedError("no record begins there")
    size = int(_RECORD.unpack_from(page)[1])
    if size % PAGE or not PAGE <= size <= MOST_HEADER_BYTES:
        raise DamagedError("a record's header is damaged")
    return size


def decode_record(header: bytes, segment: bytes, offset: int) -> Record:
    """Of a header that was read at `offset` of `segment`."""
    if record_header_bytes(header) != len(header) or not _is_sealed(header):
        raise DamagedError("a record's header is damaged")
    _, size, owner, place, names, pieces, piece_bytes, payload_bytes, tokens = _RECORD.unpack_from(header)
    if (owner, place) != (segment, offset):
        raise DamagedError("a record is not where it was written")
    if (
        not names
        or not piece_bytes
        or -(-payload_bytes // piece_bytes) != pieces
        or size != _header_bytes(names, pieces)
    ):
        raise DamagedError("a record's lengths make no sense")
    start = _RECORD.size
    end = start + names * NAME_BYTES
    listed = tuple(header[at : at + NAME_BYTES] for at in range(start, end, NAME_BYTES))
    checksums = _unpack(header[end : end + pieces * CRC_BYTES])
    return Record(segment, offset, piece_bytes, payload_bytes, tokens, listed, checksums)


def whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def record_bytes(names: int, pieces: int, payload_bytes: int) -> int:
    """All that a record takes of a file."""
    return _header_bytes(names, pieces) + whole_pages(payload_bytes)


def most_names(block_bytes: int, room: int) -> int:
    """Blocks that a record of at most `room` bytes can hold."""
    count = room // (block_bytes + NAME_BYTES + CRC_BYTES)
    while count > 0 and record_bytes(count, count, count * block_bytes) > room:
        count -= 1
    return count


def _header_bytes(names: int, pieces: int) -> int:
    return whole_pages(_RECORD.size + names * NAME_BYTES + pieces * CRC_BYTES + CRC_BYTES)


def _sealed(content: bytes, size: int) -> bytes:
    filled = content.ljust(size - CRC_BYTES, b"\0")
    return filled + zlib.crc32(filled).to_bytes(CRC_BYTES, "little")


def _is_sealed(header: bytes) -> bool:
    return zlib.crc32(header[:-CRC_BYTES]) == int.from_bytes(header[-CRC_BYTES:], "little")


def _pack(checksums: array[int]) -> bytes:
    return struct.pack(f"<{len(checksums)}I", *checksums)


def _unpack(data: bytes) -> array[int]:
    return array("I", struct.unpack(f"<{len(data) // CRC_BYTES}I", data))
