"""The block pool: equal blocks, handed out and taken back in O(1), shared by reference count.

A block is free (in the stack), or it has one reference per holder. The prefix index counts as one holder.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray


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

    def examine(self, held: NDArray[np.int32], piece: int) -> Iterator[int]:
        """Check that every block is free or has exactly as many references as `held` counts holders for it.

        In pieces of at most `piece` blocks; yields how many each had.
        """
        references = np.frombuffer(self._references, np.int32)
        stacked = np.zeros(self.total, np.bool_)
        for begin in range(0, len(self._free), piece):
            blocks = np.array(self._free[begin : begin + piece])
            if stacked[blocks].any() or len(np.unique(blocks)) < len(blocks):
                raise AssertionError("a block is in the free stack twice")
            stacked[blocks] = True
            yield len(blocks)
        for begin in range(0, self.total, piece):
            part = slice(begin, begin + piece)
            wrong = np.flatnonzero(held[part] != references[part])
            if wrong.size:
                raise AssertionError(f"reference counts differ from holders for blocks {(wrong + begin)[:8].tolist()}")
            if (stacked[part] != (held[part] == 0)).any():
                raise AssertionError("the free stack and the reference counts disagree")
            yield len(held[part])
