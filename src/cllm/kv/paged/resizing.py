"""Resizing an arena when several models share memory: as much is open as the ledger has granted.

Addresses are reserved for the most a model may ever have. Extents beyond the grant are closed: nothing is allocated
there, and the OS has their memory. To shrink, unused prefixes are evicted, the oldest first, blocks that lie too high
move down, and the extents that become empty are given back and closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cllm.errors import BackendError
from cllm.kv.ledger import NEVER, Account
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.compaction import in_calls, plan_fill
from cllm.kv.paged.extents import extent_blocks

log = logging.getLogger("cllm.kv")

SHRINK_BYTES = 32 << 20
"""Memory given back at once: some milliseconds."""

LEAST_EXTENTS = 64

AHEAD = 2
"""Extents requested beyond what is needed now, so that the next sequence need not ask."""


def extent_size(blocks: int, block_bytes: int) -> int:
    """Blocks per extent when models share memory: smaller than otherwise, so that more of it can change hands."""
    return max(1, min(extent_blocks(blocks, block_bytes), blocks // LEAST_EXTENTS))


class ArenaResizer:
    def __init__(
        self,
        arena: Arena,
        account: Account,
        *,
        evict: Callable[[int], None],
        release: Callable[[range], bool],
        unpin: Callable[[], bool],
    ) -> None:
        """`release` gives the memory of empty extents back to the OS, `unpin` drops a pinned prefix. Both return
        whether they did."""
        self._arena = arena
        self._account = account
        self._evict = evict
        self._release = release
        self._unpin = unpin
        self._coming = False

    def restart(self) -> None:
        """The pool is new, open and empty: close what is not granted."""
        self._arena.pool.resize(self._extents_in(self._account.kv))

    @property
    def pending(self) -> int:
        """Blocks to be given back, which new sequences must not take."""
        keeps = self._extents_in(self._account.target)
        return max(0, self._arena.pool.total - keeps * self._arena.extent_blocks)

    def tend(self, *, somebody_waits: bool) -> bool:
        """Between steps or while idle: give back what the ledger asks for, and request some for what runs. True: there
        is more to do."""
        shrinking = self.shrink()
        if self._arena.running:
            if not shrinking:
                self.want(self._arena.extent_blocks)
        elif not somebody_waits:
            self._account.needs_no_more()
        self.follow()
        return shrinking

    def want(self, blocks: int, found: int = 0) -> bool:
        """A sequence needs `blocks` free blocks beside `found` cached ones: ask the ledger for more if necessary. True:
        other models are about to give some back, which is worth waiting for."""
        arena = self._arena
        extents, account = arena.pool.extents, self._account
        account.keep_least()
        missing = -(-(blocks - arena.pool.free) // extents.size)
        if missing <= 0 or extents.open == extents.count:
            return False
        closed = extents.count - extents.open
        needed = extents.open + min(missing, closed)
        size = self._bytes_of(needed)
        ahead = self._bytes_of(needed + AHEAD) - size
        coming = self._coming = account.ask(size - account.kv, self._oldest_prefix(), ahead)
        self.follow()
        if not coming and blocks + found <= arena.pool.free + arena.evictable:
            account.needs_no_more()
        return coming

    @property
    def may_grow(self) -> bool:
        """Whether a sequence waits for memory that other models have."""
        return self._account.missing > 0

    @property
    def expects_more(self) -> bool:
        """Whether that memory will come: others are about to give it back, or must as soon as they can."""
        return self.may_grow and (self._coming or self._account.kv < self._account.least)

    def follow(self) -> None:
        """Open what was granted, and report how much of it is unused."""
        arena, account = self._arena, self._account
        granted = self._extents_in(account.kv)
        if granted > arena.pool.extents.open and account.target >= account.kv:
            arena.pool.resize(granted)
        account.vacant = self._bytes_beside(arena.pool.total - arena.pool.free)
        account.unused = self._bytes_beside(arena.pool.total - arena.pool.free - arena.evictable)
        account.oldest = self._oldest_prefix()

    def shrink(self) -> bool:
        """Shrink a step towards the target. True: there is more to do."""
        arena, account = self._arena, self._account
        pool = arena.pool
        extents, size = pool.extents, pool.extents.size
        if account.target >= account.kv:
            return False
        wanted = self._extents_in(account.target)
        goal = max(wanted, extents.open - max(1, SHRINK_BYTES // arena.extent_bytes))
        used = pool.total - pool.free
        if used > goal * size:
            self._evict(min(used - goal * size, arena.evictable))
            used = pool.total - pool.free
        goal = max(goal, -(-used // size))
        if goal < extents.open:
            above = pool.free_map.count(0, goal * size, pool.total)
            if above and arena.pinned:
                return False  # blocks being loaded must not move; it goes on when they have arrived
            if not self._vacate(goal, above):
                account.keep_all()
                return False
            pool.resize(goal)
        account.give_back(min(account.kv, self._bytes_of(extents.open)))
        if goal > wanted and used > (goal - 1) * size and not arena.evictable:
            if account.is_owed and self._unpin():
                return True
            self.follow()
            account.keep_used()
            return False
        return account.target < account.kv

    def _vacate(self, goal: int, above: int) -> bool:
        """Move the `above` blocks above the first `goal` extents down, and give that memory back to the OS."""
        arena = self._arena
        pool = arena.pool
        try:
            for call in in_calls(plan_fill(pool.open_map(), above)) if above else ():
                arena.relocate(call)
        except BackendError as error:
            if error.fatal:
                raise
            log.error("move_blocks failed: %s; this model keeps its KV memory", error)
            return False
        taken = [extent for extent in range(goal, pool.extents.open) if pool.extents.taken[extent]]
        return not taken or self._release(range(taken[0], taken[-1] + 1))

    def _bytes_beside(self, blocks: int) -> int:
        """Bytes of the extents that could be closed if `blocks` blocks stayed."""
        arena = self._arena
        return self._bytes_of(arena.pool.extents.open) - self._bytes_of(-(-blocks // arena.extent_blocks))

    def _bytes_of(self, extents: int) -> int:
        """Bytes of the lowest extents; the last one may be smaller."""
        arena = self._arena
        return min(extents * arena.extent_bytes, arena.geometry.blocks * arena.block_bytes)

    def _extents_in(self, size: int) -> int:
        """How many of the lowest extents fit into `size` bytes."""
        count = self._arena.pool.extents.count
        return count if size >= self._bytes_of(count) else size // self._arena.extent_bytes

    def _oldest_prefix(self) -> float:
        policy = self._arena.prefixes.policy
        return policy.oldest_at() if len(policy) else NEVER
