"""A segment in memory, and reading one's headers from a file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from cllm.kv.disk.files import Files, read_all
from cllm.kv.disk.format import (
    PAGE,
    DamagedError,
    Record,
    SegmentHeader,
    SegmentKind,
    decode_record,
    decode_segment_header,
    record_header_bytes,
)


class Place(NamedTuple):
    """Where a block lies."""

    record: Record
    piece: int


class Piece(NamedTuple):
    """Blocks from `first` on were last used at `stamp`, those before them later."""

    stamp: int
    first: int


class Segment:
    """Blocks [0, count) can be read; the file has `size` bytes.

    Using a block uses all before it, so later blocks were never used more recently than earlier ones: a segment is
    evicted from its end, and nothing has to be rewritten to keep what is in use.
    """

    def __init__(self, path: str, header: SegmentHeader, size: int, stamp: int) -> None:
        self.path = path
        self.header = header
        self.size = size
        self.modified_ns = stamp
        """The file's modification time as we know it; if it differs, another process has used the file."""
        self.count = 0
        self.records: list[Record] = []
        self._starts: list[int] = []
        self._uses: list[tuple[int, int]] = []
        """(blocks, stamp): the first `blocks` blocks were used at `stamp`. More blocks, longer ago."""

    @property
    def is_sequence(self) -> bool:
        return self.header.kind is SegmentKind.SEQUENCE

    @property
    def whole(self) -> bool:
        """Whether it ends with a whole record, so that another can be appended."""
        return self.size == (self.records[-1].end if self.records else PAGE)

    def add(self, record: Record) -> None:
        """Append a record, as far as the file has it."""
        self._starts.append(self.count)
        self.records.append(record)
        self.count += record.whole_pieces(self.size) if not self.is_sequence else int(self.size >= record.end)

    def names(self, first: int = 0) -> Iterator[tuple[int, bytes]]:
        """The readable blocks from number `first` on, with their names."""
        for start, record in zip(self._starts, self.records, strict=True):
            for number in range(max(first, start), min(self.count, start + len(record.names))):
                yield number, record.names[number - start]

    def place(self, block: int) -> Place:
        at = bisect_right(self._starts, block) - 1
        return Place(self.records[at], block - self._starts[at])

    def offset(self, block: int) -> int:
        """The file's size if truncated before this block, without a record that would be empty."""
        record, piece = self.place(block)
        return record.payload + piece * record.piece_bytes if piece else record.offset

    def cut(self, block: int, size: int) -> None:
        """Blocks from this one on are gone, and the file has `size` bytes."""
        self.count = block
        self.size = size
        keep = bisect_right(self._starts, block - 1) if block else 0
        del self._starts[keep:], self.records[keep:]
        self._uses = [(min(blocks, block), stamp) for blocks, stamp in self._uses]

    # -- use ---------------------------------------------------------------------------------------------------

    def use(self, blocks: int, stamp: int) -> None:
        """The first `blocks` blocks are used at `stamp`."""
        self._uses = [(count, when) for count, when in self._uses if when > stamp or count > blocks]
        self._uses.append((blocks, stamp))
        self._uses.sort(key=lambda use: use[1])

    def pieces(self) -> list[Piece]:
        """From the end to the beginning, least recently used first."""
        found: list[Piece] = []
        end = self.count
        for number, (_, stamp) in enumerate(self._uses):
            later = max((blocks for blocks, _ in self._uses[number + 1 :]), default=0)
            first = 0 if self.is_sequence else min(later, end)
            if first < end:
                found.append(Piece(stamp, first))
                end = first
        if end:
            found.append(Piece(self._uses[-1][1] if self._uses else self.modified_ns, 0))
        return found


class Scanned(NamedTuple):
    segment: Segment
    torn: bool
    """What follows the last record is unfinished or damaged."""


def scan(files: Files, file: int, path: str) -> Scanned:
    """Read a segment's headers. DamagedError: not a segment; OtherVersionError: of another format version."""
    status = files.status(file)
    header = decode_segment_header(read_page(files, file, 0, PAGE))
    segment = Segment(path, header, status.st_size, status.st_mtime_ns)
    return Scanned(segment, _read_records(files, file, segment))


def _read_records(files: Files, file: int, segment: Segment) -> bool:
    """Read all records. True: something follows that is no record."""
    offset = PAGE
    while offset < segment.size:
        try:
            record = read_record(files, file, segment.header, offset)
        except DamagedError:
            return True
        if record.whole_pieces(segment.size) == 0 or (segment.is_sequence and segment.size < record.end):
            return True
        segment.add(record)
        offset = record.end
    return False


def read_record(files: Files, file: int, header: SegmentHeader, offset: int) -> Record:
    page = read_page(files, file, offset, PAGE)
    size = record_header_bytes(page)
    if size > PAGE:
        page += read_page(files, file, offset + PAGE, size - PAGE)
    record = decode_record(page, header.id, offset)
    if header.kind is SegmentKind.BLOCKS and (
        record.piece_bytes != header.block_bytes or len(record.names) != len(record.checksums)
    ):
        raise DamagedError("a record's blocks have another size than its segment's")
    return record


def read_page(files: Files, file: int, offset: int, size: int) -> bytes:
    """Fewer bytes where the file ends."""
    buffer = bytearray(size)
    return bytes(buffer[: read_all(files, file, [memoryview(buffer)], offset)])
