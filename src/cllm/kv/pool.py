"""The block pool: equal blocks, handed out and taken back in O(1), shared by reference count.

A block is free (in the stack), or it has one reference per holder. The prefix index counts as one holder.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np


class BlockPool:
    __slots__ = ("_free", "_references", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        # A stack whose top is the lowest number, so that a fresh pool hands out ascending, adjacent blocks.
        self._free = list(range(total - 1, -1, -1))
        self._references = array("i", bytes(4 * total))

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None and no change."""
        free = self._free
        if count > len(free):
            return None
        if count == 1:
            block = free.pop()
            self._references[block] = 1
            return [block]
        taken = free[len(free) - count :]
        del free[len(free) - count :]
        taken.reverse()
        references = self._references
        for block in taken:
            references[block] = 1
        return taken

    def share(self, block: int) -> None:
        if self._references[block] <= 0:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference each; the last one frees the block. Given in table order, so reversed onto the stack."""
        references, free = self._references, self._free
        for block in reversed(blocks):
            left = references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} was released more often than it was held")
            references[block] = left
            if left == 0:
                free.append(block)

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def free_spans(self) -> tuple[int, int]:
        """How many runs of adjacent free blocks there are, and the longest. O(total): for idle moments."""
        used = np.frombuffer(self._references, dtype=np.int32) != 0
        edges = np.flatnonzero(np.diff(np.concatenate(([True], used, [True])).astype(np.int8)))
        if edges.size == 0:
            return 0, 0
        lengths = edges[1::2] - edges[0::2]
        return int(lengths.size), int(lengths.max())

    def check(self, held: Iterable[int]) -> None:
        """Every block is free or held, with exactly the references that `held` (one item per holder) names."""
        counted = array("i", bytes(4 * self.total))
        for block in held:
            counted[block] += 1
        if counted != self._references:
            wrong = [b for b in range(self.total) if counted[b] != self._references[b]]
            raise AssertionError(f"reference counts differ from holders for blocks {wrong[:8]}")
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is in the free stack twice")
        if any((block in free) != (counted[block] == 0) for block in range(self.total)):
            raise AssertionError("the free stack and the reference counts disagree")
