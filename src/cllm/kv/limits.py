"""How much of a paged arena is open: as much as the ledger of all models has granted.

The arena is reserved for the most that a model may ever have. Extents beyond the grant are closed: nothing is put
there, and their memory is with the OS. To shrink, unused prefixes go, the oldest first, what lies too high moves down,
and the extents that are empty then are given back and closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cllm.errors import BackendError
from cllm.kv.arena import Arena
from cllm.kv.compaction import in_calls, plan_fill
from cllm.kv.extents import extent_blocks
from cllm.kv.ledger import NEVER, Account

log = logging.getLogger("cllm.kv")

SHRINK_BYTES = 32 << 20
"""Memory that is given back in one piece: some milliseconds."""

LEAST_EXTENTS = 64

AHEAD = 2
"""Extents that are asked for beyond what is needed now, so that the next who comes need not ask."""


def extent_size(blocks: int, block_bytes: int) -> int:
    """How many blocks make an extent of an arena that models share: less than one that a model has to itself, for what
    one of them does not need another one may."""
    return max(1, min(extent_blocks(blocks, block_bytes), blocks // LEAST_EXTENTS))


class Limits:
    def __init__(
        self,
        arena: Arena,
        account: Account,
        *,
        evict: Callable[[int], None],
        release: Callable[[range], bool],
        unpin: Callable[[], bool],
    ) -> None:
        """`release` gives the memory of empty extents back; False: it could not. `unpin` lets go of a pinned prefix;
        False: there is none."""
        self._arena = arena
        self._account = account
        self._evict = evict
        self._release = release
        self._unpin = unpin
        self._coming = False

    def restart(self) -> None:
        """The books are new: everything is open and empty."""
        self._arena.pool.resize(self._extents_in(self._account.kv))

    @property
    def pending(self) -> int:
        """Blocks that are to be given back: no newcomer may have them."""
        keeps = self._extents_in(self._account.target)
        return max(0, self._arena.pool.total - keeps * self._arena.extent_blocks)

    def tend(self, *, somebody_waits: bool) -> bool:
        """Between steps, or while idle: give back what is to be given back, have some ready for what runs. True: there
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
        """Somebody needs so many free blocks beside unused ones that were `found`; have more of the arena opened for
        them, if that can be had. True: it is worth waiting for others who are about to give some back."""
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
        if not coming and blocks + found <= arena.pool.free + arena.prefixes.evictable:
            account.needs_no_more()
        return coming

    @property
    def may_grow(self) -> bool:
        """Whether somebody waits for memory that other models have."""
        return self._account.missing > 0

    @property
    def expects_more(self) -> bool:
        """Whether what somebody waits for will come: others are about to give it back, or have to as soon as they
        can."""
        return self.may_grow and (self._coming or self._account.kv < self._account.least)

    def follow(self) -> None:
        """Open what was granted, and say how much of it is unused."""
        arena, account = self._arena, self._account
        granted = self._extents_in(account.kv)
        if granted > arena.pool.extents.open and account.target >= account.kv:
            arena.pool.resize(granted)
        account.vacant = self._bytes_beside(arena.pool.total - arena.pool.free)
        account.unused = self._bytes_beside(arena.pool.total - arena.pool.free - arena.prefixes.evictable)
        account.oldest = self._oldest_prefix()

    def shrink(self) -> bool:
        """Go a piece of the way down to the target. True: there is more to do."""
        arena, account = self._arena, self._account
        pool = arena.pool
        extents, size = pool.extents, pool.extents.size
        if account.target >= account.kv:
            return False
        wanted = self._extents_in(account.target)
        goal = max(wanted, extents.open - max(1, SHRINK_BYTES // arena.extent_bytes))
        used = pool.total - pool.free
        if used > goal * size:
            self._evict(min(used - goal * size, arena.prefixes.evictable))
            used = pool.total - pool.free
        goal = max(goal, -(-used // size))
        if goal < extents.open:
            above = self._used_above(goal)
            if above and arena.pinned:
                return False  # blocks that are being read into stay where they are; when they are here, it goes on
            if not self._vacate(goal, above):
                account.keep_all()
                return False
            pool.resize(goal)
        account.give_back(min(account.kv, self._bytes_of(extents.open)))
        if goal > wanted and used > (goal - 1) * size and not arena.prefixes.evictable:
            if account.is_owed and self._unpin():
                return True
            self.follow()
            account.keep_used()
            return False
        return account.target < account.kv

    def _used_above(self, goal: int) -> int:
        pool = self._arena.pool
        return pool.free_map.count(0, goal * pool.extents.size, pool.total)

    def _vacate(self, goal: int, above: int) -> bool:
        """Leave nothing above the first `goal` extents, neither the `above` blocks that are there nor memory."""
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
        """Of the extents that could be closed if so many blocks stayed."""
        arena = self._arena
        return self._bytes_of(arena.pool.extents.open) - self._bytes_of(-(-blocks // arena.extent_blocks))

    def _bytes_of(self, extents: int) -> int:
        """Of the lowest extents; the last one may be narrower than others."""
        arena = self._arena
        return min(extents * arena.extent_bytes, arena.geometry.blocks * arena.block_bytes)

    def _extents_in(self, size: int) -> int:
        """How many of the lowest extents so many bytes are enough for."""
        count = self._arena.pool.extents.count
        return count if size >= self._bytes_of(count) else size // self._arena.extent_bytes

    def _oldest_prefix(self) -> float:
        policy = self._arena.prefixes.policy
        return policy.oldest_at() if len(policy) else NEVER
