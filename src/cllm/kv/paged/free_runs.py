"""Where runs of free blocks for prompts are: a tree over the extents, so that none is searched for block by block.

Every node knows, of the blocks below it, how many are free in a row at its beginning (`head`), at its end (`tail`), and
at most anywhere (`best`). Extents opened for generated tokens count as full. What has changed since the last search is
looked at then, once per extent.
"""

from __future__ import annotations

from cllm.kv.paged.extents import GENERATION, Extents


class FreeRuns:
    __slots__ = ("_best", "_extents", "_free_map", "_head", "_leaves", "_tail")

    def __init__(self, extents: Extents, free_map: bytearray) -> None:
        self._extents = extents
        self._free_map = free_map
        self._leaves = 1 << max(0, extents.count - 1).bit_length()
        """The tree is a heap: node 1 is the root, and `_leaves` the first extent. What is beyond the last is full."""
        self._head = [0] * (2 * self._leaves)
        self._tail = list(self._head)
        self._best = list(self._head)
        for extent in range(extents.count):
            self._set(self._leaves + extent, *self._runs_in(extent))
        for node in range(self._leaves - 1, 0, -1):
            self._set(node, *self._joined(2 * node, self._width(2 * node)))

    def find(self, count: int) -> tuple[int, int]:
        """Where the lowest run of `count` blocks begins, and `count`; if there is none so long, the lowest of the
        longest ones and its length, which is 0 if there are none at all."""
        self._refresh()
        count = min(count, self._best[1])
        node, first, width = 1, 0, self._leaves * self._extents.size
        while node < self._leaves:
            node *= 2
            width //= 2
            if self._best[node] >= count:
                continue
            if self._tail[node] + self._head[node + 1] >= count:
                return first + width - self._tail[node], count
            node += 1
            first += width
        return self._free_map.find(b"\1" * count, first, first + width), count

    def check(self) -> None:
        """Compare with a tree made from scratch; raises AssertionError."""
        self._refresh()
        right = FreeRuns(self._extents, self._free_map)
        if (self._head, self._tail, self._best) != (right._head, right._tail, right._best):
            raise AssertionError("free runs are not where they are thought to be")

    # -- inside ------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        head, tail, best = self._head, self._tail, self._best
        changed = self._extents.changed
        while changed:
            extent = changed.pop()
            node, width = self._leaves + extent, self._extents.size
            values = self._runs_in(extent)
            while values != (head[node], tail[node], best[node]):
                head[node], tail[node], best[node] = values
                if node == 1:
                    break
                values = self._joined(node & ~1, width)
                node >>= 1
                width *= 2

    def _set(self, node: int, head: int, tail: int, best: int) -> None:
        self._head[node], self._tail[node], self._best[node] = head, tail, best

    def _runs_in(self, extent: int) -> tuple[int, int, int]:
        extents = self._extents
        width, room = extents.widths[extent], extents.room[extent]
        if not room or extents.kinds[extent] == GENERATION:
            return 0, 0, 0
        if room == width:
            return width, width, width
        first = extents.first_block(extent)
        places = self._free_map[first : first + width]
        return places.find(0), width - 1 - places.rfind(0), max(map(len, places.split(b"\0")))

    def _joined(self, left: int, width: int) -> tuple[int, int, int]:
        """The entry of the parent of `left` and its neighbour, which have room for `width` blocks each."""
        right = left + 1
        head, tail, best = self._head[left], self._tail[right], self._best
        across = self._tail[left] + self._head[right]
        return (
            head if head < width else across,
            tail if tail < width else across,
            max(best[left], best[right], across),
        )

    def _width(self, node: int) -> int:
        return self._extents.size * self._leaves >> (node.bit_length() - 1)
