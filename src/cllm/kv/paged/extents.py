"""The arena in extents: groups of adjacent blocks, the unit in which memory is taken from the OS and given back.

One byte per extent says what may be allocated there, so that `bytearray.find` finds the lowest one of a kind.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

EMPTY, PROMPT, GENERATION = range(3)
"""What an extent was opened for; it may hold the other kind, too, when space is short."""

FULL, FRESH, READY, ROOM_FOR_PROMPTS, ROOM_FOR_GENERATION, CLOSED = range(6)
"""States. FRESH and READY are empty; READY is backed by memory of the OS. The next two are partly filled. CLOSED ones
are empty and must not be used."""

EXTENT_BYTES = 8 << 20
"""Four large pages (2 MiB): an extent is not aligned to them, and whole ones must lie in it to go back."""

MOST_BLOCKS = 512
"""However small the blocks are: finding a place looks through whole extents."""

LEAST_EXTENTS = 8
"""A small arena has smaller extents, so that there are enough to give back."""


def extent_blocks(blocks: int, block_bytes: int) -> int:
    """Blocks per extent."""
    return max(1, min(EXTENT_BYTES // block_bytes, MOST_BLOCKS, blocks // LEAST_EXTENTS))


class Extents:
    __slots__ = (
        "changed", "count", "emptied_at", "kinds", "now", "occupied", "open", "room", "size", "states", "taken",
        "taken_count", "widths",
    )  # fmt: skip

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self.count = self.open = -(-blocks // size)
        """All extents, and how many of them, the lowest, are open."""
        self.widths = [size] * (blocks // size) + [blocks % size] * (blocks % size > 0)
        """Blocks in each; the last one may have fewer."""
        self.room = list(self.widths)
        """Free blocks in each."""
        self.kinds = bytearray(self.count)
        self.states = bytearray([FRESH]) * self.count
        self.changed: set[int] = set()
        """Extents in which there may be other room for prompts since somebody looked and emptied this."""
        self.taken = bytearray(self.count)
        """1: backed by memory of the OS."""
        self.taken_count = 0
        self.occupied = 0
        """Extents that are not empty."""
        self.now = 0.0
        """The current time, set by the owner."""
        self.emptied_at: array[float] = array("d", bytes(8 * self.count))
        """When each empty extent became empty."""

    def fill(self, extent: int, blocks: int, kind: int) -> None:
        """`blocks` of its free blocks are in use now."""
        self.room[extent] -= blocks
        self.changed.add(extent)
        if not self.kinds[extent] or not self.room[extent]:
            self.filled(extent, kind)

    def filled(self, extent: int, kind: int) -> None:
        """Its first or last free block came into use; `room` is up to date."""
        self.changed.add(extent)
        if not self.kinds[extent]:
            self.occupied += 1
            self.kinds[extent] = kind
            self.taken_count += 1 - self.taken[extent]
            self.taken[extent] = 1
        self.restate(extent)

    def drain(self, extent: int, blocks: int) -> None:
        """`blocks` of its blocks have become free."""
        self.room[extent] += blocks
        self.drained(extent)

    def drained(self, extent: int) -> None:
        """Blocks of it became free; `room` is up to date."""
        self.changed.add(extent)
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
        """It is backed by memory of the OS now."""
        self.taken_count += 1 - self.taken[extent]
        self.taken[extent] = 1
        self.restate(extent)

    def give_back(self, extent: int) -> None:
        """It is empty, and its memory went back to the OS."""
        self.taken_count -= self.taken[extent]
        self.taken[extent] = 0
        self.restate(extent)

    def resize(self, count: int) -> None:
        """Have the lowest `count` open. Those that close must be empty, their memory given back."""
        self.changed.update(range(min(count, self.open), max(count, self.open)))
        for extent in range(self.open, count):
            self.room[extent] = self.widths[extent]
            self.states[extent] = FRESH
        for extent in range(count, self.open):
            if self.states[extent] != FRESH:
                raise ValueError(f"extent {extent} cannot be closed: it is in use, or its memory was not given back")
            self.room[extent] = 0
            self.states[extent] = CLOSED
        self.open = count

    def first_block(self, extent: int) -> int:
        return extent * self.size

    def ready(self) -> NDArray[np.int64]:
        """Empty extents backed by memory, lowest first."""
        return np.flatnonzero(np.frombuffer(self.states, np.uint8) == READY)

    def ready_count(self) -> int:
        return self.taken_count - self.occupied

    def across(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """The extents of a run of blocks, with the number of its blocks in each."""
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
