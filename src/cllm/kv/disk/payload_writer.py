"""Writes a record's payload and computes its checksums, at full speed or throttled.

At full speed, slices go through the page cache while other threads compute checksums, and the disk starts on each slice
while the next is copied. Throttled, they are gathered in a buffer and written with O_DIRECT: that takes less CPU time
and no page cache from others.
"""

from __future__ import annotations

import errno
import mmap
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from cllm.kv.disk.files import Files, write_all
from cllm.kv.disk.format import PAGE
from cllm.kv.disk.threads import DaemonPool
from cllm.kv.disk.throttle import Throttle

GATHERED_BYTES = 4 << 20
"""Written per call: some milliseconds."""

BEGIN_SYNC_BYTES = 4 << 20
"""The disk starts on this much while more is checksummed and copied."""

SUMMED_BYTES = 2 << 20
"""Checksummed by one thread at a time."""

MOST_PIECES = 500
"""Most pieces per call."""

Group = list[tuple[int, memoryview]]
"""Parts of pieces, with the pieces' numbers."""


class PayloadWriter:
    def __init__(self, files: Files, throttle: Throttle, pool: DaemonPool | None) -> None:
        self._pool = pool
        self._files = files
        self._throttle = throttle
        self._gathered: memoryview | None = None
        self._count = 0
        """Bytes gathered so far."""
        self._directly = True
        """Whether the file system supports O_DIRECT, as far as is known."""

    def write(self, file: int, pieces: Sequence[memoryview], padding: int, offset: int) -> tuple[list[int], float]:
        """Write the pieces and `padding` zeros. Returns the pieces' checksums, the last of which covers the zeros, and
        the seconds paused."""
        sums, rested, began = [0] * len(pieces), 0.0, offset
        self._count = 0
        self._throttle.begin()
        coming = None if self._throttle.active else self._sum_elsewhere(pieces, padding)
        for group, gathered in self._groups([*enumerate(pieces), (len(pieces) - 1, memoryview(bytes(padding)))]):
            size = 0
            for number, part in group:
                size += len(part)
                if coming is None:
                    sums[number] = zlib.crc32(part, sums[number])
            if gathered:
                self._gather(group)
                if self._count == GATHERED_BYTES:
                    offset = began = self._write_gathered(file, offset)
            else:
                write_all(self._files, file, [part for _, part in group], offset)
                offset += size
                if offset - began >= BEGIN_SYNC_BYTES:
                    self._files.begin_sync(file, began, offset - began)
                    began = offset
            rested += self._throttle.rest()
        self._write_gathered(file, offset)
        return (sums if coming is None else [found for one in coming for found in one.result()]), rested

    def _sum_elsewhere(self, pieces: Sequence[memoryview], padding: int) -> list[Future[list[int]]] | None:
        """None: there is no thread pool."""
        if self._pool is None:
            return None
        step = max(1, SUMMED_BYTES // len(pieces[0]))
        starts = range(0, len(pieces), step)
        try:
            return [
                self._pool.submit(_checksums, pieces[at : at + step], padding if at == starts[-1] else 0)
                for at in starts
            ]
        except RuntimeError:  # the store was closed
            return None

    def forget(self) -> None:
        """Nothing to write: free the buffer."""
        self._gathered = None

    def _groups(self, pieces: Sequence[tuple[int, memoryview]]) -> Iterator[tuple[Group, bool]]:
        """Groups of pieces that are written without a pause, and whether each is gathered first. That is decided with
        its size, whatever the throttle does meanwhile."""
        group: Group = []
        room, gathered = self._room()
        for number, piece in pieces:
            done = 0
            while done < len(piece):
                part = piece[done : done + room]
                group.append((number, part))
                done += len(part)
                room -= len(part)
                if room <= 0 or len(group) >= MOST_PIECES:
                    yield group, gathered
                    group = []
                    room, gathered = self._room()
        if group:
            yield group, gathered

    def _room(self) -> tuple[int, bool]:
        """The size of the next group, and whether it is gathered; if so, it fits into the buffer."""
        return GATHERED_BYTES - self._count, self._throttle.active or self._count > 0

    def _gather(self, group: Group) -> None:
        if self._gathered is None:
            self._gathered = memoryview(mmap.mmap(-1, GATHERED_BYTES))  # page-aligned
        for _, part in group:
            # numpy releases the GIL for this; assigning to a memoryview would not.
            np.copyto(np.frombuffer(self._gathered[self._count : self._count + len(part)], np.uint8), part)
            self._count += len(part)

    def _write_gathered(self, file: int, offset: int) -> int:
        """Write the buffer; returns the offset after it."""
        if self._gathered is None or not self._count:
            return offset
        data, self._count = self._gathered[: self._count], 0
        if not self._write_directly(file, data, offset):
            write_all(self._files, file, [data], offset)
            self._files.begin_sync(file, offset, len(data))
        return offset + len(data)

    def _write_directly(self, file: int, data: memoryview, offset: int) -> bool:
        """Write with O_DIRECT. False: not possible."""
        if not self._directly or offset % PAGE or len(data) % PAGE:
            return False
        try:
            self._files.direct(file, True)
            try:
                write_all(self._files, file, [data], offset)
            finally:
                self._files.direct(file, False)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            self._directly = False
        return self._directly


def _checksums(pieces: Sequence[memoryview], padding: int) -> list[int]:
    sums = list(map(zlib.crc32, pieces))
    sums[-1] = zlib.crc32(bytes(padding), sums[-1])
    return sums
