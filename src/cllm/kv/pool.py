"""The block pool: equal blocks of one arena, handed out by where they lie, shared by reference count.

A block is free, or it has one reference per table that holds it (the prefix tree counts as one) and the number of a
holder. Prompts get runs of adjacent blocks; generated blocks go one by one, into extents of their own while there is
choice, the lowest first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.kv.extents import (
    FRESH,
    GENERATION,
    PROMPT,
    READY,
    ROOM_FOR_GENERATION,
    ROOM_FOR_PROMPTS,
    Extents,
)
from cllm.kv.ops import Move

DEFAULT_EXTENT = 32


class BlockPool:
    __slots__ = ("_apart", "_lowest", "_references", "extents", "free", "free_map", "holders", "total")

    def __init__(self, total: int, extent_blocks: int = DEFAULT_EXTENT, *, apart: bool = True) -> None:
        """Without `apart` every block goes to the lowest free place, whatever it is for."""
        self.total = self.free = total
        self.extents = Extents(total, extent_blocks)
        self.free_map = bytearray(b"\1") * total
        """1: free. Others only read it."""
        self.holders: array[int] = array("i", bytes(4 * total))
        """The number of who holds each block; of several tables the first."""
        self._references = array("i", bytes(4 * total))
        self._apart = apart
        self._lowest = 0
        """No block below this one is free."""

    # -- handing out -------------------------------------------------------------------------------------------

    def allocate(self, count: int, holder: int = 0, *, kind: int = PROMPT, after: int = -1) -> list[int] | None:
        """`count` blocks with one reference each, or None and no change. They had best lie behind block `after`."""
        if count > self.free:
            return None
        if not self._apart:
            return self._lowest_free(count, holder)
        if kind == GENERATION:
            if count == 1:
                return [self._one_generated(holder, after)]
            blocks: list[int] = []
            for _ in range(count):
                after = self._one_generated(holder, after)
                blocks.append(after)
            return blocks
        return self._prompt(count, holder, after)

    def _one_generated(self, holder: int, after: int) -> int:
        free_map, extents = self.free_map, self.extents
        size = extents.size
        block = after + 1
        extent = block // size
        if not (
            0 < block < self.total
            and free_map[block]
            and (extents.kinds[extent] == GENERATION or extent == after // size)
        ):
            extent = self._extent_for_generation()
            block = free_map.find(1, extent * size)
        free_map[block] = 0
        self._references[block] = 1
        self.holders[block] = holder
        self.free -= 1
        room = extents.room
        left = room[extent] - 1
        room[extent] = left
        if left + 1 == extents.widths[extent]:
            extents.open(extent, GENERATION)
        elif not left:
            extents.restate(extent)
        return block

    def _extent_for_generation(self) -> int:
        find = self.extents.states.find
        extent = find(ROOM_FOR_GENERATION)
        if extent < 0:
            extent = find(READY)
        if extent < 0:
            extent = find(FRESH)
        return extent if extent >= 0 else find(ROOM_FOR_PROMPTS)

    def _prompt(self, count: int, holder: int, after: int) -> list[int]:
        """One run where there is one: behind `after`, apart from generated blocks, or anywhere; else the longest."""
        run = b"\1" * count
        start = after + 1
        if not (start and self.free_map.startswith(run, start) and self._apart_from_generation(start, count) is None):
            start = self._find_prompt_run(run)
        if start < 0:
            start = self.free_map.find(run, self._lowest)
        if start >= 0:
            self._take_run(start, count, holder, PROMPT)
            return list(range(start, start + count))
        return self._take_runs(self._longest_runs(count), holder)

    def _find_prompt_run(self, run: bytes) -> int:
        start = self._lowest
        while (start := self.free_map.find(run, start)) >= 0:
            beyond = self._apart_from_generation(start, len(run))
            if beyond is None:
                return start
            start = beyond
        return -1

    def _apart_from_generation(self, start: int, count: int) -> int | None:
        """None if no extent of that run was opened for generated blocks; else where the last such one ends."""
        size = self.extents.size
        last = self.extents.kinds.rfind(GENERATION, start // size, (start + count - 1) // size + 1)
        return None if last < 0 else (last + 1) * size

    def _longest_runs(self, count: int) -> list[tuple[int, int]]:
        """Free runs of `count` blocks together, as few as possible, in the order of their places."""
        starts, lengths = free_runs(self.free_map)
        chosen: list[tuple[int, int]] = []
        for index in np.argsort(-lengths, kind="stable").tolist():
            length = min(int(lengths[index]), count)
            chosen.append((int(starts[index]), length))
            count -= length
            if not count:
                break
        return sorted(chosen)

    def _lowest_free(self, count: int, holder: int) -> list[int]:
        find, start = self.free_map.find, self._lowest
        runs: list[tuple[int, int]] = []
        while count:
            start = find(1, start)
            end = find(0, start, start + count)
            length = min(count, self.total - start) if end < 0 else end - start
            runs.append((start, length))
            count -= length
            start += length
        return self._take_runs(runs, holder)

    def _take_runs(self, runs: Sequence[tuple[int, int]], holder: int) -> list[int]:
        blocks: list[int] = []
        for start, length in runs:
            self._take_run(start, length, holder, PROMPT)
            blocks += range(start, start + length)
        return blocks

    def _take_run(self, start: int, count: int, holder: int, kind: int) -> None:
        end = start + count
        self.free_map[start:end] = bytes(count)
        self._references[start:end] = array("i", [1]) * count
        self.holders[start:end] = array("i", [holder]) * count
        self.free -= count
        if start == self._lowest:
            self._lowest = end
        for extent, blocks in self.extents.across(start, count):
            self.extents.fill(extent, blocks, kind)

    # -- holding and taking back -------------------------------------------------------------------------------

    def share(self, block: int) -> None:
        if self._references[block] <= 0:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._references[block] += 1

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def hand_over(self, blocks: Sequence[int], holder: int) -> None:
        holders = self.holders
        for block in blocks:
            holders[block] = holder

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference each; the last one frees the block."""
        references, free_map, holders, extents = self._references, self.free_map, self.holders, self.extents
        room, widths, size = extents.room, extents.widths, extents.size
        for block in blocks:
            left = references[block] - 1
            if left:
                if left < 0:
                    raise ValueError(f"block {block} was released more often than it was held")
                references[block] = left
                continue
            references[block] = holders[block] = 0
            free_map[block] = 1
            self.free += 1
            if block < self._lowest:
                self._lowest = block
            extent = block // size
            now_free = room[extent] + 1
            room[extent] = now_free
            if now_free == 1 or now_free == widths[extent]:
                extents.restate_drained(extent)

    def move(self, moves: Sequence[Move]) -> None:
        """What was in these blocks is elsewhere now, in blocks that were free; whoever held it holds it still."""
        for source, target, count in moves:
            old, new = slice(source, source + count), slice(target, target + count)
            for values in (self._references, self.holders):
                values[new] = values[old]
                values[old] = array("i", bytes(4 * count))
            self.free_map[new] = bytes(count)
            self.free_map[old] = b"\1" * count
            self._lowest = min(self._lowest, source)
            kind = self.extents.kinds[source // self.extents.size]
            for extent, blocks in self.extents.across(target, count):
                self.extents.fill(extent, blocks, kind)
            for extent, blocks in self.extents.across(source, count):
                self.extents.drain(extent, blocks)

    # -- looking -----------------------------------------------------------------------------------------------

    def examine(self, held: NDArray[np.int32], piece: int) -> Iterator[int]:
        """Check that every block is free or has exactly as many references as `held` counts holders for it.

        In pieces of at most `piece` blocks; yields how many each had.
        """
        references = np.frombuffer(self._references, np.int32)
        free = np.frombuffer(self.free_map, np.bool_)
        for begin in range(0, self.total, piece):
            part = slice(begin, begin + piece)
            wrong = np.flatnonzero(held[part] != references[part])
            if wrong.size:
                raise AssertionError(f"reference counts differ from holders for blocks {(wrong + begin)[:8].tolist()}")
            if (free[part] != (held[part] == 0)).any():
                raise AssertionError("the map of free blocks and the reference counts disagree")
            yield len(held[part])
        if self.free != self.free_map.count(1) or 0 <= self.free_map.find(1) < self._lowest:
            raise AssertionError("free blocks are counted wrong")
        self.extents.check(free)


def free_runs(free_map: bytes | bytearray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where runs of adjacent free blocks begin, and how long they are. O(total): not for every step."""
    free = np.frombuffer(free_map, np.int8)
    edges = np.flatnonzero(np.diff(free, prepend=np.int8(0), append=np.int8(0)))
    return edges[0::2], edges[1::2] - edges[0::2]
