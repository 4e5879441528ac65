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
        extents = self._arena.pool.extents
        self._arena.pool.resize(min(extents.count, self._account.kv // self._arena.extent_bytes))

    @property
    def pending(self) -> int:
        """Blocks that are to be given back: no newcomer may have them."""
        keeps = self._account.target // self._arena.extent_bytes
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
        missing, ahead = min(missing, closed), min(AHEAD, closed - min(missing, closed))
        more = (extents.open + missing) * arena.extent_bytes - account.kv
        coming = self._coming = account.ask(more, self._oldest_prefix(), ahead * arena.extent_bytes)
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
        granted = min(arena.pool.extents.count, account.kv // arena.extent_bytes)
        if granted > arena.pool.extents.open and account.target >= account.kv:
            arena.pool.resize(granted)
        account.vacant = self._extents_beside(arena.pool.total - arena.pool.free) * arena.extent_bytes
        referenced = arena.pool.total - arena.pool.free - arena.prefixes.evictable
        account.unused = self._extents_beside(referenced) * arena.extent_bytes
        account.oldest = self._oldest_prefix()

    def shrink(self) -> bool:
        """Go a piece of the way down to the target. True: there is more to do."""
        arena, account = self._arena, self._account
        pool = arena.pool
        extents, size = pool.extents, pool.extents.size
        if account.target >= account.kv:
            return False
        wanted = account.target // arena.extent_bytes
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
        account.give_back(min(account.kv, extents.open * arena.extent_bytes))
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

    def _extents_beside(self, blocks: int) -> int:
        """Whole extents that could be closed if so many blocks stayed."""
        return self._arena.pool.extents.open - -(-blocks // self._arena.extent_blocks)

    def _oldest_prefix(self) -> float:
        policy = self._arena.prefixes.policy
        return policy.oldest_at() if len(policy) else NEVER
