"""The arena in extents: groups of adjacent blocks, the measure in which memory is taken from the OS and given back.

One byte per extent says what may go there, so that the lowest one of a kind is found by one search of C.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

EMPTY, PROMPT, GENERATION = range(3)
"""What an extent was opened for; it may hold the other kind too, when there was no choice."""

FULL, FRESH, READY, ROOM_FOR_PROMPTS, ROOM_FOR_GENERATION, CLOSED = range(6)
"""States: FRESH and READY hold nothing, the memory of READY is taken from the OS; the next two are filled in part. What
is CLOSED holds nothing and may not be used."""

EXTENT_BYTES = 8 << 20
"""An extent lies across the borders of large pages (2 MiB); so that whole ones lie in it, it is as large as four."""

LEAST_EXTENTS = 8
"""A small arena has smaller extents instead, for only whole ones can be given back."""


def extent_blocks(blocks: int, block_bytes: int) -> int:
    """How many blocks make an extent of an arena."""
    return max(1, min(EXTENT_BYTES // block_bytes, blocks // LEAST_EXTENTS))


class Extents:
    __slots__ = (
        "count", "emptied_at", "kinds", "now", "occupied", "open", "room", "size", "states", "taken", "taken_count",
        "widths",
    )  # fmt: skip

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self.count = self.open = -(-blocks // size)
        """How many there are, and how many of them, the lowest, are not closed."""
        self.widths = [min(size, blocks - first) for first in range(0, blocks, size)]
        """Blocks of each; the last one may have fewer."""
        self.room = list(self.widths)
        """Free blocks of each."""
        self.kinds = bytearray(self.count)
        self.states = bytearray([FRESH]) * self.count
        self.taken = bytearray(self.count)
        """1: its memory is taken from the OS."""
        self.taken_count = 0
        self.occupied = 0
        """Extents that hold something."""
        self.now = 0.0
        """The time, as the owner last told it."""
        self.emptied_at: array[float] = array("d", bytes(8 * self.count))
        """When each became empty, if it is."""

    def fill(self, extent: int, blocks: int, kind: int) -> None:
        """So many of its free blocks are in use now."""
        self.room[extent] -= blocks
        if not self.kinds[extent] or not self.room[extent]:
            self.filled(extent, kind)

    def filled(self, extent: int, kind: int) -> None:
        """Its first or its last free block came into use, and is counted."""
        if not self.kinds[extent]:
            self.occupied += 1
            self.kinds[extent] = kind
            self.taken_count += 1 - self.taken[extent]
            self.taken[extent] = 1
        self.restate(extent)

    def drain(self, extent: int, blocks: int) -> None:
        """So many of its blocks have become free."""
        self.room[extent] += blocks
        self.drained(extent)

    def drained(self, extent: int) -> None:
        """Blocks of it became free, and are counted."""
        if self.room[extent] == self.widths[extent]:
            self.occupied -= 1
            self.kinds[extent] = EMPTY
            self.emptied_at[extent] = self.now
        self.restate(extent)

    def restate(self, extent: int) -> None:
        room = self.room[extent]
        if room == self.widths[extent]:
            state = READY if self.taken[extent] else FRESH
        elif room:
            state = ROOM_FOR_GENERATION if self.kinds[extent] == GENERATION else ROOM_FOR_PROMPTS
        else:
            state = FULL
        self.states[extent] = state

    def take(self, extent: int) -> None:
        """Its memory is taken from the OS."""
        self.taken_count += 1 - self.taken[extent]
        self.taken[extent] = 1
        self.restate(extent)

    def give_back(self, extent: int) -> None:
        """Its memory, which must be free, went back to the OS."""
        self.taken_count -= self.taken[extent]
        self.taken[extent] = 0
        self.restate(extent)

    def resize(self, count: int) -> None:
        """Have the lowest `count` open. What is closed by this must be empty, its memory given back."""
        for extent in range(self.open, count):
            self.room[extent] = self.widths[extent]
            self.states[extent] = FRESH
        for extent in range(count, self.open):
            if self.states[extent] != FRESH:
                raise ValueError(f"extent {extent} is in use, or its memory is taken: it cannot be closed")
            self.room[extent] = 0
            self.states[extent] = CLOSED
        self.open = count

    def first_block(self, extent: int) -> int:
        return extent * self.size

    def ready(self) -> NDArray[np.int64]:
        """Empty extents whose memory is taken, lowest first."""
        return np.flatnonzero(np.frombuffer(self.states, np.uint8) == READY)

    def ready_count(self) -> int:
        return self.taken_count - self.occupied

    def across(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """The extents of a run of blocks, with how many of its blocks lie in each."""
        size, end = self.size, first + count
        while first < end:
            extent = first // size
            stop = min(end, (extent + 1) * size)
            yield extent, stop - first
            first = stop

    def check(self, free: NDArray[np.bool_]) -> None:
        """Compare with which blocks are free; raises AssertionError."""
        room = np.add.reduceat(free, np.arange(0, len(free), self.size))
        if room.tolist() != self.room:
            raise AssertionError("an extent counts other free blocks than it has")
        closed = self.count - self.open
        if any(self.taken[self.open :]) or self.states[self.open :] != bytes([CLOSED]) * closed:
            raise AssertionError("an extent that is closed is in use")
        empty = (room == np.array(self.widths)) | (np.arange(self.count) >= self.open)
        if self.occupied != int((~empty).sum()) or self.taken_count != sum(self.taken):
            raise AssertionError("extents in use, or taken from the OS, are counted wrong")
        if (~np.frombuffer(self.taken, np.bool_) & ~empty).any():
            raise AssertionError("an extent is in use, but its memory is not taken")
        for extent in range(self.open):
            state = self.states[extent]
            self.restate(extent)
            if self.states[extent] != state or (self.kinds[extent] == EMPTY) != bool(empty[extent]):
                raise AssertionError(f"the state of extent {extent} is wrong")
