"""What the paged cache does between steps and while idle: compact, give memory back to the OS, take some ahead.

    quiet (no sequence came or went for `release_after_s`)   evict cached prefixes beyond the idle size, oldest first;
                                                             compact if that pays;
                                                             give free extents beyond the idle size back to the OS
    busy                                                     the same without evictions, in the time left by a step,
                                                             and only extents that have been free that long
    idle (nothing runs)                                      take a little memory ahead of its first use

The idle size is the memory that may stay taken beyond what running sequences need.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cllm.errors import BackendError
from cllm.kv.ops import Move
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.compaction import (
    CompactionEstimate,
    CompactionTrigger,
    Compactor,
    MovePlan,
    plan_fill,
    plan_lift,
    plan_slide,
)
from cllm.kv.paged.extents import CLOSED, FRESH, READY
from cllm.kv.paged.fragmentation import blocks_to_move, extents_needed

log = logging.getLogger("cllm.kv")

EVICT_AT_ONCE = 256
LOOK_INTERVAL_S = 1.0
"""A busy cache is checked at most this often: for memory to give back, and to measure fragmentation."""

PREPARE_BYTES = 1 << 20
"""Memory taken ahead at once: 2 ms where page faults are slow."""

RELEASE_BYTES = 32 << 20
"""Memory given back at once while nothing runs: some milliseconds."""

STRIKES = 3
"""After this many failures in a row an operation is not tried again."""

RARELY = 200
"""Asking the OS for resident memory walks page tables: at most one part in this many of the time is spent on it."""


@dataclass(frozen=True, slots=True)
class UpkeepSettings:
    release_after_s: float | None = None
    """Quiet time after which memory goes back; None: never."""
    idle_bytes: int = 0
    """Memory that may stay taken beyond what running sequences need, including cached prefixes."""
    ahead_bytes: int = 0
    """Memory to take ahead while idle, within `idle_bytes`."""
    compaction: Literal["auto", "off", "always"] = "off"


class Upkeep:
    """Measurements and counts survive `restart`, after which the arena is empty and has no memory."""

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
        self.trigger = CompactionTrigger()
        self.compactions = self.released_bytes = self.prepared_bytes = self.resident_bytes = self.failures = 0
        self._arena = arena
        self._evict = evict
        self._clock = clock
        self._strikes: Counter[str] = Counter()
        self._resident_at = -1e9
        self.restart()

    def restart(self) -> None:
        self._left_to_move = 0
        """Blocks that the current compaction may still move."""
        self._sliding = True
        self._looked_at = -1e9
        self._going: list[int] = []
        """Extents to give back while busy, the next one last."""
        self._preparing = (-1, 0)
        """The extent being prepared, and how many of its blocks are ready."""
        self.note_activity()

    def note_activity(self) -> None:
        """A sequence came or went."""
        self._active_at = self._clock()
        self._settled = False

    def due_at(self) -> float | None:
        """When quiet work is due; None: there is none."""
        after = self.settings.release_after_s
        return None if after is None or self._settled else self._active_at + after

    def work(self, budget_s: float) -> bool:
        """Work for about `budget_s`. True: there is more to do."""
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
        """Empty extents with memory, beyond what running sequences need and the idle size."""
        arena = self._arena
        excess = arena.taken_bytes - arena.referenced_bytes - self.settings.idle_bytes
        return min(-(-excess // arena.extent_bytes), arena.pool.extents.ready_count())

    def _long_unused(self, since: float) -> list[int]:
        extents = self._arena.pool.extents
        ready = extents.ready() if self._spare_extents() > 0 else np.empty(0, np.int64)
        unused: list[int] = ready[np.frombuffer(extents.emptied_at)[ready] <= since].tolist()
        return unused

    def _highest_run(self, most: int) -> range:
        """The highest adjacent empty extents with memory, at most `most`. The lowest are used first."""
        states = self._arena.pool.extents.states
        end = states.rfind(READY) + 1
        start = end
        while start > 0 and end - start < most and states[start - 1] == READY:
            start -= 1
        return range(start, end)

    def _extents_at_once(self) -> int:
        return 1 if self._arena.running else max(1, RELEASE_BYTES // self._arena.extent_bytes)

    def release(self, run: range) -> bool:
        """Give the memory of these empty extents back to the OS. Neighbours that went before are included once more, so
        that pages across the border go, too."""
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
        """Run a slice of the current compaction, or of a new one if that pays. False: there is nothing to move."""
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
        """Not into empty extents: each one filled costs one of those that the moves empty."""
        return plan_fill(free, most, self._arena.pool.holes())

    def _begin_compaction(self) -> bool:
        after = self.settings.release_after_s
        if self.settings.compaction == "off" or after is None or self._strikes["move_blocks"] >= STRIKES:
            return False
        estimate = self.estimate()
        if not self.trigger.pays(estimate):
            return False
        self._left_to_move = estimate.cost_blocks
        # By then, what it frees has been unused long enough to go back.
        judge_at = self._clock() + 2 * after + estimate.cost_s
        self.trigger.promise(estimate.gain_bytes, self.released_bytes + self._ready_bytes(), judge_at)
        return True

    def _ready_bytes(self) -> int:
        extents = self._arena.pool.extents
        return sum(extents.widths[extent] for extent in map(int, extents.ready())) * self._arena.block_bytes

    def estimate(self) -> CompactionEstimate:
        arena = self._arena
        pool = arena.pool
        occupied = pool.extents.occupied
        # Extents that are empty already can go back without any move.
        spare = occupied * arena.extent_bytes - arena.referenced_bytes - self.settings.idle_bytes
        extents = min(occupied - extents_needed(pool), -(-spare // arena.extent_bytes))
        if extents < 1:
            return CompactionEstimate(0, 0, 0.0)
        blocks = blocks_to_move(pool, extents)
        return CompactionEstimate(
            extents * arena.extent_bytes, blocks, blocks * arena.block_bytes / self.compactor.throughput.bytes_per_s
        )

    def _keep_moving(self, budget_s: float) -> bool:
        """For measuring: move blocks up and down all the time."""
        if self._strikes["move_blocks"] >= STRIKES or self._arena.pinned:
            return False
        moved = self._move(plan_slide if self._sliding else plan_lift, self._arena.pool.total, budget_s)
        if moved == 0:
            self._sliding = not self._sliding
            self.compactions += 1
        return True

    def _move(self, plan: MovePlan, most: int, budget_s: float) -> int | None:
        """None: there was not enough time for a block, or a call failed and the compaction is given up."""
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
        """Take a little memory before a sequence has to wait for it."""
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
        """Ask the OS how much of the arena is resident, if the last time was long enough ago.

        Only while nothing runs: for a large arena it takes too long between two steps.
        """
        if now < self._resident_at or self._strikes["resident_bytes"] >= STRIKES:
            return
        started = self._clock()
        if self._try("resident_bytes"):
            self._resident_at = now + max(LOOK_INTERVAL_S, RARELY * (self._clock() - started))

    def _try(self, name: str, *args: int) -> bool:
        """Call a backend operation that touches no held memory: if it fails, no request needs to."""
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
            self._resident_at = -1e9  # the last answer is out of date
        return True

    def _strike(self, name: str, error: Exception) -> None:
        self.failures += 1
        self._strikes[name] += 1
        last = "; it will not be tried again" if self._strikes[name] >= STRIKES else ""
        log.error("%s failed: %s%s", name, error or type(error).__name__, last)

    def details(self) -> dict[str, Any]:
        estimate = self.estimate()
        return {
            "quiet_work_pending": self.due_at() is not None,
            "move_bytes_per_s": round(self.compactor.throughput.bytes_per_s),
            "compaction_price_bytes_per_s": round(self.trigger.price),
            "compaction_would_free_bytes": estimate.gain_bytes,
            "compaction_would_move_bytes": estimate.cost_blocks * self._arena.block_bytes,
            "not_tried_any_more": sorted(name for name, count in self._strikes.items() if count >= STRIKES),
        }
