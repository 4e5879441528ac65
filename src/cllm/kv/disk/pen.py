"""How a payload gets into a file: summed up on the way, at full speed or gently.

At full speed slices go through the system's memory, summed up by other threads meanwhile, and the disk begins with
each while the next is copied. Gently, they are gathered, and go to the disk from there without being copied to the
system's memory: that takes less of the processor's time, and no pages of which others are deprived.
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
from cllm.kv.disk.helpers import Helpers
from cllm.kv.disk.pace import GENTLE_SLICE_BYTES, SLICE_BYTES, Pace

GATHERED_BYTES = 4 << 20
"""Written with one call while answers are generated."""

BEGIN_SYNC_BYTES = 4 << 20
"""The disk begins with so much, while more is summed up and copied."""

SUMMED_BYTES = 2 << 20
"""By one thread at a time."""

MOST_PIECES = 500
"""In one call."""

Group = list[tuple[int, memoryview]]
"""Parts of pieces, with the pieces' numbers."""


class Pen:
    def __init__(self, files: Files, pace: Pace, helpers: Helpers | None) -> None:
        self._helpers = helpers
        self._files = files
        self._pace = pace
        self._gathered: memoryview | None = None
        self._count = 0
        """Bytes of it that are to be written."""
        self._directly = True
        """Whether the file system can do without the system's memory, as far as is known."""

    def write(self, file: int, pieces: Sequence[memoryview], padding: int, offset: int) -> tuple[list[int], float]:
        """Write pieces one behind the other, and zeros. The pieces' checksums, of which the last one goes on over the
        zeros; and the seconds that were rested."""
        sums, rested, began = [0] * len(pieces), 0.0, offset
        self._count = 0
        self._pace.begin()
        coming = None if self._pace.gentle else self._sum_elsewhere(pieces, padding)
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
            rested += self._pace.rest(size)
        self._write_gathered(file, offset)
        return (sums if coming is None else [found for one in coming for found in one.result()]), rested

    def _sum_elsewhere(self, pieces: Sequence[memoryview], padding: int) -> list[Future[list[int]]] | None:
        """None: nobody else can."""
        if self._helpers is None:
            return None
        step = max(1, SUMMED_BYTES // len(pieces[0]))
        starts = range(0, len(pieces), step)
        try:
            return [
                self._helpers.submit(_checksums, pieces[at : at + step], padding if at == starts[-1] else 0)
                for at in starts
            ]
        except RuntimeError:  # the store was closed
            return None

    def forget(self) -> None:
        """There is nothing to write: give the memory back to the system."""
        self._gathered = None

    def _groups(self, pieces: Sequence[tuple[int, memoryview]]) -> Iterator[tuple[Group, bool]]:
        """What is summed up without a rest, and whether it is to be gathered: that is settled with its size, whatever
        becomes of the pace meanwhile."""
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
        """Bytes of the next group, and whether it is gathered, in which case it fits there."""
        gentle = self._pace.gentle
        size = GENTLE_SLICE_BYTES if gentle else SLICE_BYTES
        return (min(size, GATHERED_BYTES - self._count), True) if gentle or self._count else (size, False)

    def _gather(self, group: Group) -> None:
        if self._gathered is None:
            self._gathered = memoryview(mmap.mmap(-1, GATHERED_BYTES))  # begins with a page
        for _, part in group:
            # Others may hold the interpreter meanwhile, which they may not if bytes are assigned.
            np.copyto(np.frombuffer(self._gathered[self._count : self._count + len(part)], np.uint8), part)
            self._count += len(part)

    def _write_gathered(self, file: int, offset: int) -> int:
        """Where the next byte goes."""
        if self._gathered is None or not self._count:
            return offset
        data, self._count = self._gathered[: self._count], 0
        if not self._write_directly(file, data, offset):
            write_all(self._files, file, [data], offset)
            self._files.begin_sync(file, offset, len(data))
        return offset + len(data)

    def _write_directly(self, file: int, data: memoryview, offset: int) -> bool:
        """False: it has to go through the system's memory."""
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
