"""Events of the slots manager, in whole blocks as those of the paged one.

Several entries may hold the same block; it is stored with the first of them and removed with the last.
"""

from __future__ import annotations

from array import array
from collections import Counter

from cllm.kv.block_names import chain, root_name
from cllm.kv.events import KVEvents


class BlockNameCounts:
    """How many entries hold each block, by its name."""

    def __init__(self, events: KVEvents, block_tokens: int) -> None:
        self.counts: Counter[bytes] = Counter()
        self._events = events
        self._block_tokens = block_tokens
        events.cleared()

    def extend(self, names: list[bytes], tokens: array[int], space: bytes) -> None:
        """An entry holds `tokens` now. `names` has the blocks it held before; the new ones are appended."""
        size, known = self._block_tokens, len(names)
        if len(tokens) // size == known:
            return
        names += chain(names[-1] if names else root_name(space), tokens[known * size :], size)
        # An entry that holds a block holds all before it, so the new ones are at the end.
        first = len(names)
        while first > known and names[first - 1] not in self.counts:
            first -= 1
        self.counts.update(names[known:])
        if first < len(names):
            self._events.stored(names[first - 1] if first else root_name(space), names[first:])

    def remove(self, names: list[bytes]) -> None:
        """An entry holds none of its blocks any more."""
        last = len(names)
        for name in reversed(names):
            if self.counts[name] > 1:
                break
            last -= 1
        for name in names[:last]:
            self.counts[name] -= 1
        for name in names[last:]:
            del self.counts[name]
        if last < len(names):
            self._events.removed(names[last:])
        names.clear()
