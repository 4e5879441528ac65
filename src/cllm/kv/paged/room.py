"""Room in the arena: every block is taken here, and evicted here when there is no free one.

evict ──► offload.before_eviction: to host memory or disk, if worth it ──► the tree forgets the blocks ──► told
"""

from __future__ import annotations

from collections.abc import Callable

from cllm.kv.manager import EvictionListener
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.offload import BlockOffload


class Room:
    """`threshold`: most blocks in use before cached ones are evicted ahead of need. Counts survive `restart`, after
    which the arena is empty."""

    def __init__(
        self,
        arena: Arena,
        offload: BlockOffload,
        *,
        threshold: int,
        max_sequences: int | None,
        told: EvictionListener,
        clock: Callable[[], float],
    ) -> None:
        self.evictions = self.peak = 0
        self._arena = arena
        self._offload = offload
        self._threshold = threshold
        self._max_sequences = max_sequences
        self._told = told
        self._clock = clock

    def restart(self) -> None:
        self.peak = 0

    @property
    def available(self) -> int:
        """Blocks that are free or can be evicted."""
        return self._arena.pool.free + self._arena.evictable

    @property
    def excess(self) -> int:
        """Blocks to evict down to the threshold."""
        arena = self._arena
        return min(arena.evictable, arena.pool.total - arena.pool.free - self._threshold)

    @property
    def all_run(self) -> bool:
        """Whether as many sequences run, or are being loaded, as there may be."""
        return self._max_sequences is not None and len(self._arena.running) >= self._max_sequences

    # -- taking ------------------------------------------------------------------------------------------------

    def for_prompt(self, count: int, holder: int, after: int = -1) -> list[int]:
        """`count` blocks, which are known to be available, for known tokens that follow the block `after`."""
        self._make(count)
        return self._taken(self._arena.pool.allocate(count, holder, after))

    def for_generation(self, count: int, holder: int, after: int) -> list[int]:
        """`count` blocks, which are known to be available, for tokens to come after the block `after`."""
        self._make(count)
        return self._taken(self._arena.pool.extend(count, holder, after))

    def _make(self, count: int) -> None:
        free = self._arena.pool.free
        if count > free:
            self.evict(count - free)

    def _taken(self, blocks: list[int] | None) -> list[int]:
        if blocks is None:
            raise AssertionError("blocks were available but could not be allocated")
        self.peak = max(self.peak, self._arena.referenced)
        self._offload.reuse(blocks)
        return blocks

    # -- evicting ----------------------------------------------------------------------------------------------

    def evict(self, count: int) -> None:
        """Free at least `count` evictable blocks, or all, in the order of eviction."""
        self._evict(count, self._arena.evict)

    def evict_ahead(self, most: int) -> bool:
        """Evict up to `most` of the excess. Whether there is more to do."""
        excess = self.excess
        return excess > 0 and self._evict(min(excess, most), self._arena.evict_ahead) > 0 and excess > most

    def _evict(self, count: int, evict: Callable[[int], int]) -> int:
        self._offload.before_eviction(count)
        started = self._clock()
        freed = evict(count)
        self.evictions += freed
        if freed:
            self._told(freed, self._clock() - started)
        return freed

    def limit_sequences(self) -> None:
        """Evict the oldest until there are no more sequences than there may be: a sequence came, or left a prefix."""
        prefixes, most = self._arena.prefixes, self._max_sequences
        while most is not None and prefixes.held > max(0, most - len(self._arena.running)):
            self._evict(len(prefixes.policy.peek().value), lambda _: prefixes.evict_leaf())
