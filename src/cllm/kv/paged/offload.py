"""What leaves the arena: blocks about to be evicted are copied to host memory, and what is worth it is written to disk,
from host memory or from the arena."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cllm.kv.paged.arena import Arena
from cllm.kv.paged.disk_offload import RESCUE_S, DiskOffload
from cllm.kv.tiers.host_tier import HostTier
from cllm.kv.tiers.tiers import Tiers

BUSY_SHARE = 0.2
"""The share of the upkeep budget for offloading while something runs: the writing then competes with steps."""

AHEAD_BYTES = 1 << 30
"""How much is copied to host memory ahead of its eviction, so that nobody waits for it; at most a quarter of the
arena."""

AHEAD_AT_ONCE_BYTES = 64 << 20
"""Most of that between two steps."""


class BlockOffload:
    def __init__(self, arena: Arena, tiers: Tiers, clock: Callable[[], float]) -> None:
        self.to_disk = DiskOffload(arena, tiers, clock)
        self._arena = arena
        self._tiers = tiers
        self._ahead_state = (-1, -1, -1)
        """The arena's state when everything due for eviction was copied."""

    def restart(self) -> None:
        """The arena is new and empty."""
        if self._tiers.host is not None:
            self._tiers.host.restart()
        self.to_disk.clear()
        self.count_copies()

    # -- blocks about to go ------------------------------------------------------------------------------------

    def before_eviction(self, count: int) -> None:
        """`count` blocks are about to be evicted: copy them to host memory, or write candidates, which may be among
        them, to disk."""
        host, prefixes = self._tiers.host, self._arena.prefixes
        if host is not None and host.usable:
            leaving = list(prefixes.next_to_go(count))
            leaving.reverse()  # parents before children, as in every chain
            host.keep(
                [name for names, _ in leaving for name in names], [block for _, part in leaving for block in part]
            )
            self.count_copies()
        elif self.to_disk.blocks > prefixes.evictable - count:
            self.to_disk.rescue(self._time(RESCUE_S, RESCUE_S))

    def reuse(self, blocks: Iterable[int]) -> None:
        """These blocks will be overwritten."""
        if self._tiers.host is not None:
            self._tiers.host.reuse(blocks)

    def count_copies(self) -> None:
        """Update which blocks must not move."""
        self._arena.copying_blocks = 0 if self._tiers.host is None else self._tiers.host.copied_blocks

    # -- between steps -----------------------------------------------------------------------------------------

    def work(self, budget_s: float) -> bool:
        """Copy ahead and write candidates, for about `budget_s`. True: there is more to do."""
        self._tiers.throttle_writes(self._arena.busy)
        if self._tiers.host is not None:
            self._copy_ahead(self._tiers.host)
        self.to_disk.offer_standing()
        return self.to_disk.work(self._time(budget_s * BUSY_SHARE, budget_s), in_bursts=self._arena.busy)

    def _copy_ahead(self, host: HostTier) -> None:
        """Copy some of the next blocks to be evicted, so that they can be reused at once when needed."""
        arena = self._arena
        state = (arena.pool.free, arena.prefixes.evictable, arena.events.number)
        short = min(AHEAD_BYTES // arena.block_bytes, arena.pool.total // 4) - arena.pool.free
        if short <= 0 or state == self._ahead_state or host.copied_blocks:
            return
        left = max(1, AHEAD_AT_ONCE_BYTES // arena.block_bytes)
        for names, blocks in arena.prefixes.next_to_go(short):
            missing = [i for i, name in enumerate(names) if name not in host][-left:]
            host.keep([names[i] for i in missing], [blocks[i] for i in missing])
            left -= len(missing)
            if left <= 0:
                break
        else:
            self._ahead_state = state
        self.count_copies()

    def _time(self, busy_s: float, idle_s: float) -> float:
        """How long to write candidates."""
        if not self._arena.busy:
            return idle_s
        host = self._tiers.host
        beside_steps = not self._arena.content.reads_wait or (host is not None and host.usable)
        return busy_s if beside_steps else 0.0
