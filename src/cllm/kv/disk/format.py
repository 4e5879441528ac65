"""The format of a segment: a file with a run of blocks of one chain, or one saved sequence.

    +------------------+ 0
    | segment header   | one page: the model, and where in a chain it begins
    +------------------+ 4096
    | record header    | whole pages: names of the blocks, and a checksum of each
    | payload          | block after block, filled up with zeros to a whole page
    +------------------+
    | record header    | what was appended later
    | payload          |
    +------------------+

Numbers are little-endian. A header ends with the CRC-32 of everything before. Each piece of the payload (a block, or 1
MiB of a sequence) has its CRC-32 in the record header; the last piece's covers the padding after it, too.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from cllm.kv.block_names import NAME_BYTES

PAGE = 4096
VERSION = 2
SEQUENCE_PIECE = 1 << 20
MOST_HEADER_BYTES = 16 << 20
SUFFIX = ".kv"
CRC_BYTES = 4

_SEGMENT_MAGIC, _RECORD_MAGIC = b"cLLM-KV\n", b"cLLM-run"
_SEGMENT = struct.Struct("<8sII32s16sQIQ32sI")
_RECORD = struct.Struct("<8sI16sQIIQQI")


class SegmentKind(IntEnum):
    BLOCKS = 1
    """Consecutive blocks of a chain."""
    SEQUENCE = 2
    """One sequence as a backend saved it, which can only be loaded whole."""


class DamagedError(Exception):
    """The bytes are not what the store wrote."""


class OtherVersionError(Exception):
    """A segment in another version of the format: not usable, but not damaged."""


class OutdatedError(OtherVersionError):
    """An earlier version, which nobody reads any more."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    fingerprint: bytes
    id: bytes
    kind: SegmentKind
    block_bytes: int
    """Size of a block; 0 for a sequence."""
    block_tokens: int
    first: int
    """The first block's number in its chain."""
    parent: bytes
    """The name of the block before it, or the chain's root."""
    about: Mapping[str, str | int]
    """A description of the model, for `cllm cache`."""

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
        raise (OutdatedError if version < VERSION else OtherVersionError)(f"version {version} of the format")
    try:
        about = json.loads(page[_SEGMENT.size : _SEGMENT.size + length])
        return SegmentHeader(fingerprint, identity, SegmentKind(kind), size, tokens, first, parent, dict(about))
    except ValueError as error:
        raise DamagedError("its header makes no sense") from error


@dataclass(frozen=True, slots=True)
class Record:
    """One append: block names, and the checksums of the pieces that follow."""

    segment: bytes
    offset: int
    piece_bytes: int
    payload_bytes: int
    tokens: int
    """Sequences: the number of tokens. The last name covers all of them, the others whole blocks."""
    names: tuple[bytes, ...]
    checksums: array[int]

    @property
    def header_bytes(self) -> int:
        return _header_bytes(len(self.names), len(self.checksums))

    @property
    def payload(self) -> int:
        """Its offset."""
        return self.offset + self.header_bytes

    @property
    def end(self) -> int:
        return self.payload + whole_pages(self.payload_bytes)

    def piece_end(self, piece: int) -> int:
        """The end of what a piece's checksum covers; for the last one the record's end."""
        return self.end if piece == len(self.checksums) - 1 else self.payload + (piece + 1) * self.piece_bytes

    def whole_pieces(self, size: int) -> int:
        """How many pieces of this record fit into a file of `size` bytes."""
        if size >= self.end:
            return len(self.checksums)
        return min(max(0, (size - self.payload) // self.piece_bytes), len(self.checksums) - 1)

    def encode(self) -> bytes:
        fixed = _RECORD.pack(
            _RECORD_MAGIC, self.header_bytes, self.segment, self.offset, len(self.names), len(self.checksums),
            self.piece_bytes, self.payload_bytes, self.tokens,
        )  # fmt: skip
        return _sealed(
            fixed + b"".join(self.names) + struct.pack(f"<{len(self.checksums)}I", *self.checksums), self.header_bytes
        )


def record_header_bytes(page: bytes) -> int:
    """The length of the header that begins with this page; nothing else is checked yet."""
    if len(page) < PAGE or page[:8] != _RECORD_MAGIC:
        raise DamagedError("no record begins there")
    size = int(_RECORD.unpack_from(page)[1])
    if size % PAGE or not PAGE <= size <= MOST_HEADER_BYTES:
        raise DamagedError("a record's header is damaged")
    return size


def decode_record(header: bytes, segment: bytes, offset: int) -> Record:
    """Decode a header that was read at `offset` of `segment`."""
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
    checksums = array("I", struct.unpack_from(f"<{pieces}I", header, end))
    return Record(segment, offset, piece_bytes, payload_bytes, tokens, listed, checksums)


def whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def record_bytes(names: int, pieces: int, payload_bytes: int) -> int:
    """The size of a record in the file."""
    return _header_bytes(names, pieces) + whole_pages(payload_bytes)


def most_names(block_bytes: int, room: int) -> int:
    """How many blocks fit into a record of at most `room` bytes."""
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
