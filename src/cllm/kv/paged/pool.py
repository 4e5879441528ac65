"""The block pool: allocates the blocks of one arena by their place, with reference counts.

A block is free, or has one reference per block table that holds it (the prefix tree counts as one) and the id of a
holder. Prompts get runs of adjacent blocks. Blocks for generated tokens are allocated one by one, the lowest first, in
extents of their own where possible.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.kv.ops import Move
from cllm.kv.paged.extents import (
    EMPTY,
    FRESH,
    GENERATION,
    PROMPT,
    READY,
    ROOM_FOR_GENERATION,
    ROOM_FOR_PROMPTS,
    Extents,
)
from cllm.kv.paged.free_runs import FreeRuns

DEFAULT_EXTENT = 32


class BlockPool:
    __slots__ = ("_apart", "_likely", "_runs", "_shared", "extents", "free", "free_map", "holders", "total")

    def __init__(self, total: int, extent_blocks: int = DEFAULT_EXTENT, *, apart: bool = True) -> None:
        """`apart`: prompts and generated tokens in separate extents; otherwise every block is the lowest free one."""
        self.total = self.free = total
        """Blocks that may be used, the lowest ones; those beyond are closed."""
        self.extents = Extents(total, extent_blocks)
        self.free_map = bytearray(b"\1") * total
        """1: free. Read-only for others."""
        self.holders: array[int] = array("i", bytes(4 * total))
        """The id of each block's holder; of several tables the first."""
        self._shared: dict[int, int] = {}
        """Reference counts above one."""
        self._apart = apart
        self._runs = FreeRuns(self.extents, self.free_map)
        self._likely: list[int] = []
        """Candidates for generated blocks, the next one last; some may be in use by now."""

    # -- allocating --------------------------------------------------------------------------------------------

    def allocate(self, count: int, holder: int = 0, after: int = -1) -> list[int] | None:
        """`count` blocks for a prompt, with one reference each, or None and no change.

        In one run if possible: after block `after`, or the lowest, away from generated blocks; else in few of them.
        """
        if count > self.free:
            return None
        if not self._apart:
            return self._lowest_free(count, holder)
        start = after + 1
        if start and self.free_map.startswith(b"\1" * count, start) and not self._beside_generation(start, count):
            self._take_run(start, count, holder)
            return list(range(start, start + count))
        blocks = self._take_runs(count, holder)
        missing = count - len(blocks)
        return blocks + (self.extend(missing, holder) or []) if missing else blocks

    def extend(self, count: int, holder: int = 0, after: int = -1) -> list[int] | None:
        """`count` blocks for generated tokens, or None and no change: after block `after` if that is free, else in
        extents with such blocks, else in an empty one."""
        if count > self.free:
            return None
        if not self._apart:
            return self._lowest_free(count, holder)
        # Runs in every step for some sequences: hence one function, without calls per block.
        free_map, extents, likely = self.free_map, self.extents, self._likely
        size, kinds, room, changed = extents.size, extents.kinds, extents.room, extents.changed
        blocks: list[int] = []
        self.free -= count
        while count:
            count -= 1
            block = after + 1
            extent = block // size
            if not (
                block < self.total and free_map[block] and (kinds[extent] == GENERATION or extent == after // size)
            ):
                block = likely.pop() if likely else self._next_likely()
                while not free_map[block]:
                    block = likely.pop() if likely else self._next_likely()
                extent = block // size
            free_map[block] = 0
            self.holders[block] = holder
            room[extent] -= 1
            if kinds[extent] == PROMPT:
                changed.add(extent)
            if not (room[extent] and kinds[extent]):
                extents.filled(extent, GENERATION)
            blocks.append(block)
            after = block
        return blocks

    def _next_likely(self) -> int:
        """Find candidates for generated blocks, all free ones of an extent; returns the first."""
        find, size = self.extents.states.find, self.extents.size
        order = (ROOM_FOR_GENERATION, READY, FRESH, ROOM_FOR_PROMPTS)
        extent = next(extent for state in order if (extent := find(state)) >= 0)
        first, width = extent * size, self.extents.widths[extent]
        if self.extents.room[extent] == width:
            self._likely += range(first + width - 1, first - 1, -1)
        else:
            free = np.flatnonzero(np.frombuffer(self.free_map, np.bool_, width, first)) + first
            self._likely += free[::-1].tolist()
        return self._likely.pop()

    def _beside_generation(self, start: int, count: int) -> bool:
        """Whether an extent of that run was opened for generated blocks."""
        size = self.extents.size
        return self.extents.kinds.find(GENERATION, start // size, (start + count - 1) // size + 1) >= 0

    def _take_runs(self, count: int, holder: int) -> list[int]:
        """Up to `count` blocks away from generated ones, as many as there are: the lowest run of so many, or as few
        runs as possible, in address order."""
        runs: list[tuple[int, int]] = []
        while count:
            start, length = self._runs.find(count)
            if not length:
                break
            self._take_run(start, length, holder)
            runs.append((start, length))
            count -= length
        return [block for start, length in sorted(runs) for block in range(start, start + length)]

    def _lowest_free(self, count: int, holder: int) -> list[int]:
        blocks: list[int] = []
        while count:
            start, _ = self._runs.find(1)
            end = self.free_map.find(0, start, start + count)
            length = count if end < 0 else end - start
            self._take_run(start, length, holder)
            blocks += range(start, start + length)
            count -= length
        return blocks

    def _take_run(self, start: int, count: int, holder: int) -> None:
        end = start + count
        self.free_map[start:end] = bytes(count)
        self.holders[start:end] = array("i", [holder]) * count
        self.free -= count
        for extent, blocks in self.extents.across(start, count):
            self.extents.fill(extent, blocks, PROMPT)

    # -- sharing and freeing -----------------------------------------------------------------------------------

    def share(self, block: int) -> None:
        if self.free_map[block]:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._shared[block] = self._shared.get(block, 1) + 1

    def is_shared(self, block: int) -> bool:
        return block in self._shared

    def hand_over(self, blocks: Sequence[int], holder: int) -> None:
        holders = self.holders
        for block in blocks:
            holders[block] = holder

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference each; the last frees the block."""
        if self._shared:
            blocks = [block for block in blocks if not self._drop_reference(block)]
        free_map, holders, extents = self.free_map, self.holders, self.extents
        size, kinds, room, widths, changed = extents.size, extents.kinds, extents.room, extents.widths, extents.changed
        for block in blocks:
            if free_map[block]:
                raise ValueError(f"block {block} was released more often than it was held")
            free_map[block] = 1
            holders[block] = 0
            extent = block // size
            room[extent] = now_free = room[extent] + 1
            if kinds[extent] == PROMPT:
                changed.add(extent)
            if now_free == 1 or now_free == widths[extent]:
                extents.drained(extent)
        self.free += len(blocks)

    def _drop_reference(self, block: int) -> bool:
        """Drop one of several references; False: there is only one."""
        count = self._shared.pop(block, 1)
        if count > 2:
            self._shared[block] = count - 1
        return count > 1

    def move(self, moves: Sequence[Move]) -> None:
        """Blocks' contents were moved to free blocks: move their holders and references, too."""
        for source, target, count in moves:
            old, new = slice(source, source + count), slice(target, target + count)
            self.holders[new] = self.holders[old]
            self.holders[old] = array("i", bytes(4 * count))
            for block in [block for block in self._shared if source <= block < source + count]:
                self._shared[block - source + target] = self._shared.pop(block)
            self.free_map[new] = bytes(count)
            self.free_map[old] = b"\1" * count
            kind = self.extents.kinds[source // self.extents.size]
            for extent, blocks in self.extents.across(target, count):
                self.extents.fill(extent, blocks, kind)
            for extent, blocks in self.extents.across(source, count):
                self.extents.drain(extent, blocks)

    def resize(self, extents: int) -> None:
        """Open or close extents so that `extents` are open. Those that close must be empty, their memory given back."""
        self.extents.resize(extents)
        total = min(extents * self.extents.size, len(self.free_map))
        self.free_map[total : self.total] = bytes(max(0, self.total - total))
        self.free_map[self.total : total] = b"\1" * max(0, total - self.total)
        self.free += total - self.total
        self.total = total

    def open_map(self) -> bytearray:
        """The free map of the open blocks."""
        return self.free_map if self.total == len(self.free_map) else self.free_map[: self.total]

    def holes(self) -> bytearray:
        """The free map without empty extents, up to the highest block in use."""
        places, extents = self.free_map[: self.total], self.extents
        end = max(places.rfind(0) // extents.size, 0)
        empty = extents.kinds.find(EMPTY, 0, end)
        while empty >= 0:
            first, width = extents.first_block(empty), extents.widths[empty]
            places[first : first + width] = bytes(width)
            empty = extents.kinds.find(EMPTY, empty + 1, end)
        return places

    # -- checking ----------------------------------------------------------------------------------------------

    def examine(self, held: NDArray[np.int32], piece: int) -> Iterator[int]:
        """Check that every block is free, or has exactly as many references as `held` says.

        In pieces of at most `piece` blocks; yields their sizes.
        """
        free = np.frombuffer(self.free_map, np.bool_)
        for begin in range(0, self.total, piece):
            part = slice(begin, min(begin + piece, self.total))
            references = (~free[part]).astype(np.int32)
            for block, count in self._shared.items():
                if begin <= block < begin + piece:
                    references[block - begin] = count
            wrong = np.flatnonzero(held[part] != references)
            if wrong.size:
                raise AssertionError(f"reference counts differ from holders for blocks {(wrong + begin)[:8].tolist()}")
            yield len(held[part])
        if self.free != self.free_map.count(1):
            raise AssertionError("free blocks are counted wrong")
        self.extents.check(free)
        self._runs.check()


def free_runs(free_map: bytes | bytearray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The starts and lengths of all free runs. O(total): not for every step."""
    free = np.frombuffer(free_map, np.int8)
    edges = np.flatnonzero(np.diff(free, prepend=np.int8(0), append=np.int8(0)))
    return edges[0::2], edges[1::2] - edges[0::2]
