"""What the paged cache does between steps and while nobody asks: tidy up, give memory back, have some ready.

    quiet (nobody came or went for `release_after_s`)     cached prefixes beyond the idle size go, oldest first;
                                                          blocks are moved together if that pays;
                                                          free extents beyond the idle size go back to the OS
    busy                                                  the same without evictions, in the time a step leaves over,
                                                          and only extents that were free for that long go back
    idle (nothing runs)                                   a little memory is taken ahead of its first use

The idle size is what may stay taken beside what running sequences need.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cllm.errors import BackendError
from cllm.kv.arena import Arena
from cllm.kv.compaction import Compactor, Plan, plan_fill, plan_lift, plan_slide
from cllm.kv.extents import CLOSED, FRESH, READY
from cllm.kv.fragmentation import blocks_to_move, extents_needed
from cllm.kv.ops import Move
from cllm.kv.trigger import Offer, Trigger

log = logging.getLogger("cllm.kv")

EVICT_AT_ONCE = 256
LOOK_INTERVAL_S = 1.0
"""How often a busy cache is looked at, at most: for memory to give back, and to measure its state."""

PREPARE_BYTES = 1 << 20
"""Memory that is taken ahead in one piece: 2 ms where pages are dear."""

RELEASE_BYTES = 32 << 20
"""Memory that is given back in one piece while nothing runs: some milliseconds."""

STRIKES = 3
"""Failures in a row after which something is not tried any more."""

RARELY = 200
"""Asking the OS for the resident memory walks page tables: at most this part of the time is spent on it."""


@dataclass(frozen=True, slots=True)
class UpkeepSettings:
    release_after_s: float | None = None
    """Quiet time after which memory goes back; None: never."""
    idle_bytes: int = 0
    """What may stay taken beside what running sequences need, cached prefixes included."""
    ahead_bytes: int = 0
    """Memory to have ready while idle, within `idle_bytes`."""
    compaction: Literal["auto", "off", "always"] = "off"


class Upkeep:
    """All that is learnt outlives `restart`, after which the arena is empty and none of its memory is taken."""

    def __init__(
        self,
        arena: Arena,
        settings: UpkeepSettings,
        *,
        evict: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.compactor = Compactor(arena, clock)
        self.trigger = Trigger()
        self.compactions = self.released_bytes = self.prepared_bytes = self.resident_bytes = self.failures = 0
        self._arena = arena
        self._evict = evict
        self._clock = clock
        self._strikes: Counter[str] = Counter()
        self._resident_at = -1e9
        self.restart()

    def restart(self) -> None:
        self._left_to_move = 0
        """Blocks that the compaction in progress may still move."""
        self._sliding = True
        self._looked_at = -1e9
        self._going: list[int] = []
        """Extents that go back while the cache is busy, the next one last."""
        self._preparing = (-1, 0)
        """The extent that is being prepared, and how many of its blocks are."""
        self.stirred()

    def stirred(self) -> None:
        """Somebody came or went."""
        self._stirred_at = self._clock()
        self._settled = False

    def due_at(self) -> float | None:
        """When quiet work falls due; None: there is none."""
        after = self.settings.release_after_s
        return None if after is None or self._settled else self._stirred_at + after

    def work(self, budget_s: float) -> bool:
        """For about so many seconds; True: there is more to do."""
        now = self._clock()
        arena = self._arena
        arena.pool.extents.now = now
        self.trigger.judge(self.released_bytes, now)
        due = self.due_at()
        if arena.running and self.settings.compaction == "always":
            return self._keep_moving(budget_s)
        if due is not None and now >= due:
            more = self._quiet_work(budget_s)
        else:
            more = bool(arena.running) and self._busy_work(now, budget_s)
        return more or (not arena.running and self._prepare(now + budget_s))

    # -- quiet and busy ----------------------------------------------------------------------------------------

    def _quiet_work(self, budget_s: float) -> bool:
        arena, settings = self._arena, self.settings
        excess = arena.cached_bytes - max(0, settings.idle_bytes - settings.ahead_bytes)
        if excess > 0:
            self._evict(min(-(-excess // arena.block_bytes), EVICT_AT_ONCE))
            return True
        if self._compact(budget_s):
            return True
        spare = self._spare_extents()
        if spare > 0 and self.release(self._highest_run(min(spare, self._extents_at_once()))):
            return True
        self._settled = True
        self.trigger.judge(self.released_bytes, self._clock(), at_once=True)
        return False

    def _busy_work(self, now: float, budget_s: float) -> bool:
        after = self.settings.release_after_s
        if after is None:
            return False
        looking = now - self._looked_at >= LOOK_INTERVAL_S
        if looking:
            self._looked_at = now
            self._going = self._long_unused(now - after)
        while self._going and self._spare_extents() > 0:
            extent = self._going.pop()
            if self._arena.pool.extents.states[extent] == READY and not self.release(range(extent, extent + 1)):
                self._going = []
            if self._clock() - now >= budget_s:
                return True
        return (looking or self._left_to_move > 0) and self._compact(budget_s)

    def _spare_extents(self) -> int:
        """Extents that are taken beyond what running sequences need and the idle size."""
        arena = self._arena
        excess = arena.taken_bytes - arena.referenced_bytes - self.settings.idle_bytes
        return min(-(-excess // arena.extent_bytes), arena.pool.extents.ready_count())

    def _long_unused(self, since: float) -> list[int]:
        extents = self._arena.pool.extents
        ready = extents.ready() if self._spare_extents() > 0 else np.empty(0, np.int64)
        unused: list[int] = ready[np.frombuffer(extents.emptied_at)[ready] <= since].tolist()
        return unused

    def _highest_run(self, most: int) -> range:
        """The highest adjacent extents that are taken and empty, so many at most. The lowest are used first."""
        states = self._arena.pool.extents.states
        end = states.rfind(READY) + 1
        start = end
        while start > 0 and end - start < most and states[start - 1] == READY:
            start -= 1
        return range(start, end)

    def _extents_at_once(self) -> int:
        return 1 if self._arena.running else max(1, RELEASE_BYTES // self._arena.extent_bytes)

    def release(self, run: range) -> bool:
        """Give the memory of these extents, which are empty, back. Those next to them that went before are named once
        more, so that pages across the border go, too."""
        extents = self._arena.pool.extents
        first, last = run.start, run.stop - 1
        if first > 0 and extents.states[first - 1] == FRESH:
            first -= 1
        if last + 1 < extents.count and extents.states[last + 1] in (FRESH, CLOSED):
            last += 1
        begin = extents.first_block(first)
        if not self._try("release_pages", begin, extents.first_block(last) + extents.widths[last] - begin):
            return False
        for extent in run:
            extents.give_back(extent)
            self.released_bytes += extents.widths[extent] * self._arena.block_bytes
        return True

    # -- compaction --------------------------------------------------------------------------------------------

    def _compact(self, budget_s: float) -> bool:
        """A slice of the compaction in progress, or of one that pays; False: there is nothing to move."""
        if self._arena.pinned:
            return False
        if self._left_to_move <= 0 and not self._begin_compaction():
            return False
        moved = self._move(self._fill_holes, self._left_to_move, budget_s)
        if moved is None:
            return self._left_to_move > 0
        self._left_to_move -= moved
        if moved == 0 or self._left_to_move <= 0:
            self._left_to_move = 0
            self.compactions += 1
        return True

    def _fill_holes(self, free: bytes | bytearray, most: int) -> list[Move]:
        """Not into empty extents: each that is filled costs one of those that the moves set free."""
        return plan_fill(free, most, self._arena.pool.holes())

    def _begin_compaction(self) -> bool:
        after = self.settings.release_after_s
        if self.settings.compaction == "off" or after is None or self._strikes["move_blocks"] >= STRIKES:
            return False
        offer = self.offer()
        if not self.trigger.pays(offer):
            return False
        self._left_to_move = offer.cost_blocks
        # Until then, what it frees has been unused for long enough to go.
        judge_at = self._clock() + 2 * after + offer.cost_s
        self.trigger.promise(offer.gain_bytes, self.released_bytes + self._ready_bytes(), judge_at)
        return True

    def _ready_bytes(self) -> int:
        extents = self._arena.pool.extents
        return sum(extents.widths[extent] for extent in map(int, extents.ready())) * self._arena.block_bytes

    def offer(self) -> Offer:
        arena = self._arena
        pool = arena.pool
        occupied = pool.extents.occupied
        # What is empty already can go back without any move.
        spare = occupied * arena.extent_bytes - arena.referenced_bytes - self.settings.idle_bytes
        extents = min(occupied - extents_needed(pool), -(-spare // arena.extent_bytes))
        if extents < 1:
            return Offer(0, 0, 0.0)
        blocks = blocks_to_move(pool, extents)
        return Offer(extents * arena.extent_bytes, blocks, blocks * arena.block_bytes / self.compactor.bytes_per_s)

    def _keep_moving(self, budget_s: float) -> bool:
        """For measuring: blocks go up and come down again, all the time."""
        if self._strikes["move_blocks"] >= STRIKES or self._arena.pinned:
            return False
        moved = self._move(plan_slide if self._sliding else plan_lift, self._arena.pool.total, budget_s)
        if moved == 0:
            self._sliding = not self._sliding
            self.compactions += 1
        return True

    def _move(self, plan: Plan, most: int, budget_s: float) -> int | None:
        """None: there was not time enough for a block, or a call failed and nothing is to be moved for now."""
        try:
            moved = self.compactor.slice(plan, most, budget_s)
        except BackendError as error:
            self._left_to_move = 0
            self._strike("move_blocks", error)
            if error.fatal:
                raise
            return None
        except Exception as error:
            self._strike("move_blocks", error)
            raise
        if moved:
            self._strikes["move_blocks"] = 0
        return moved

    # -- memory ahead ------------------------------------------------------------------------------------------

    def _prepare(self, until: float) -> bool:
        """Take a little memory before somebody has to wait for it."""
        settings, arena = self.settings, self._arena
        extents = arena.pool.extents
        while True:
            extent, done = self._preparing
            if extent < 0 or extents.states[extent] != READY or done >= extents.widths[extent]:
                ready = extents.ready_count() * arena.extent_bytes
                room = settings.idle_bytes - arena.taken_bytes
                extent, done = extents.states.find(FRESH), 0
                if ready >= settings.ahead_bytes or room < arena.extent_bytes or extent < 0:
                    return False
            count = min(max(1, PREPARE_BYTES // arena.block_bytes), extents.widths[extent] - done)
            if not self._try("prepare_pages", extents.first_block(extent) + done, count):
                self._preparing = (-1, 0)
                return False
            extents.take(extent)
            self._preparing = (extent, done + count)
            self.prepared_bytes += count * arena.block_bytes
            if self._clock() >= until:
                return True

    # -- what may fail without harm ------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Ask the OS how much of the arena is in memory, if that was long enough ago.

        Only while nothing runs: for a large arena it takes longer than may lie between two steps.
        """
        if now < self._resident_at or self._strikes["resident_bytes"] >= STRIKES:
            return
        started = self._clock()
        if self._try("resident_bytes"):
            self._resident_at = now + max(LOOK_INTERVAL_S, RARELY * (self._clock() - started))

    def _try(self, name: str, *args: int) -> bool:
        """These calls touch nothing that is held, so none of them is worth a request."""
        if self._strikes[name] >= STRIKES:
            return False
        try:
            answer = getattr(self._arena.ops, name)(*args)
        except Exception as error:
            self._strike(name, error)
            return False
        self._strikes[name] = 0
        if answer is not None:
            self.resident_bytes = answer
        else:
            self._resident_at = -1e9  # what was seen last is no longer so
        return True

    def _strike(self, name: str, error: Exception) -> None:
        self.failures += 1
        self._strikes[name] += 1
        last = "; it is not tried again" if self._strikes[name] >= STRIKES else ""
        log.error("%s failed: %s%s", name, error or type(error).__name__, last)

    def details(self) -> dict[str, Any]:
        offer = self.offer()
        return {
            "quiet_work_pending": self.due_at() is not None,
            "move_bytes_per_s": round(self.compactor.bytes_per_s),
            "compaction_price_bytes_per_s": round(self.trigger.price),
            "compaction_would_free_bytes": offer.gain_bytes,
            "compaction_would_move_bytes": offer.cost_blocks * self._arena.block_bytes,
            "not_tried_any_more": sorted(name for name, count in self._strikes.items() if count >= STRIKES),
        }
