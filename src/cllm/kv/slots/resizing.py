"""Changing the number of slots: save their contents, have the backend reallocate, load them again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from operator import attrgetter

import numpy as np

from cllm.errors import BackendError
from cllm.kv.ops import SavedKV
from cllm.kv.slots.index import CacheEntry
from cllm.kv.slots.places import SlotPlaces, raise_if_fatal
from cllm.kv.slots.room import SlotRoom
from cllm.kv.slots.sizes import SlotSizes

log = logging.getLogger("cllm.kv")

NO_MEMORY = "not enough memory for %d slots instead of %d: %s"

_NOTHING: SavedKV = np.empty(0, np.uint8)


class SlotResizer:
    """`idle_bytes`: what may stay taken while nothing runs."""

    def __init__(
        self,
        places: SlotPlaces,
        room: SlotRoom,
        sizes: SlotSizes,
        *,
        idle_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.resizes = self.failed = self.released_bytes = 0
        self._places = places
        self._room = room
        self._sizes = sizes
        self._idle_bytes = idle_bytes
        self._clock = clock

    def note_running(self) -> None:
        """A sequence came or went."""
        places = self._places
        self._sizes.note(len(places.slots), len(places.running_slots()), self._clock())

    def quiet_at(self) -> float | None:
        """When there may be more slots than needed."""
        idle_at = self._sizes.idle_at()
        return self._sizes.few_at(len(self._places.slots)) if idle_at is None else idle_at

    def take_more(self, demand: int) -> None:
        """All slots run and a sequence arrives. Without memory for more, nothing changes."""
        slots = self._sizes.larger(len(self._places.slots), demand, self._clock())
        if slots is not None:
            if self._resize(slots):
                self._sizes.grown()
            self.note_running()

    def give_back(self) -> None:
        """It has been quiet: keep only the slots that are needed, and when idle only as much saved as may stay."""
        places = self._places
        if places.running_slots():
            self._sizes.few_done()
            self._resize(self._sizes.smaller())
            self.note_running()
            return
        self._sizes.idle_done()
        # Saved sequences come first: they take no more memory than they need.
        affordable = (self._idle_bytes - places.evictable_bytes - places.pinned_bytes) // places.slot_bytes
        needed = self._sizes.at_least(len(places.held_in_slots()))
        slots = self._sizes.at_most(min(affordable, needed, len(places.slots)))
        if slots < len(places.slots):
            self._resize(slots)
        self._room.make_room(0, max(0, self._idle_bytes - len(places.slots) * places.slot_bytes))

    def _resize(self, slots: int) -> bool:
        """Have `slots` slots from now on. Running sequences go on; held ones that find no slot are saved.

        The backend frees its memory before it allocates anew. In between, the slots' contents are bytes for which the
        store makes room, so the budget is never exceeded. False: it could not be done, and whatever ran still runs.
        """
        places, before = self._places, len(self._places.slots)
        if slots > before and (reason := places.ops.no_room(slots)) is not None:
            log.warning(NO_MEMORY, slots, before, reason)
            self.failed += 1
            return False
        carried = self._carry_out(slots)
        if carried is None:
            self.failed += 1
            return False
        now = self._reopen(slots, before)
        places.slots = [None] * now
        # Assign all slots first: whatever fails from here on, every sequence is in a slot and can be found there.
        for number, (entry, _) in enumerate(carried):
            places.slots[number] = entry
            entry.slot = number
            if entry.owner is not None:
                entry.owner.slot = number
        while carried:
            self._carry_in(*carried.pop())
        self.resizes += now != before
        self.failed += now != slots
        self.released_bytes += max(0, before - now) * places.slot_bytes
        if now != before:
            log.info("KV slots: %d (before: %d)", now, before)
        return now == slots

    def _carry_out(self, slots: int) -> list[tuple[CacheEntry, SavedKV]] | None:
        """The contents of at most `slots` slots as bytes, running ones first. None: they cannot be saved within the
        budget, or at all."""
        places = self._places
        limit = places.store_bytes + (places.geometry.slots - max(slots, len(places.slots))) * places.slot_bytes
        staying = [entry for entry in places.slots if entry is not None and entry.owner is not None]
        needed = sum(places.saved_bytes(entry) for entry in staying)
        while slots > len(places.slots) and needed > limit - places.reserved_bytes and places.pins.give_way():
            pass
        limit -= places.reserved_bytes
        if needed > limit:
            log.warning("cannot resize to %d slots: saving takes %d bytes, there is room for %d", slots, needed, limit)
            return None
        leaving: list[int] = []
        for entry in sorted(places.held_in_slots(), key=attrgetter("number"), reverse=True):
            size = places.saved_bytes(entry)
            if len(staying) < slots and needed + size <= limit:
                staying.append(entry)
                needed += size
            elif entry.slot is not None:
                leaving.append(entry.slot)
        for slot in reversed(leaving):  # the oldest first, and so they are evicted
            self._room.vacate(slot)
        if not self._room.make_room(needed, limit + places.reserved_bytes):
            return None
        carried: list[tuple[CacheEntry, SavedKV]] = []
        for entry in staying:
            saved = places.read(entry) if places.tokens_in(entry) else _NOTHING
            if saved is not None:
                carried.append((entry, saved))
            elif entry.owner is not None:
                return None
            else:
                places.discard(entry)
        return carried

    def _reopen(self, slots: int, before: int) -> int:
        """Allocate `slots` slots, or else as many as `before`; returns how many there are."""
        try:
            self._places.ops.resize(slots)
        except (BackendError, MemoryError) as error:
            log.warning(NO_MEMORY, slots, before, error)
        else:
            return slots
        try:
            self._places.ops.resize(before)
        except (BackendError, MemoryError) as error:
            raise BackendError(f"cannot allocate {before} slots again: {error}", fatal=True) from error
        return before

    def _carry_in(self, entry: CacheEntry, saved: SavedKV) -> None:
        """Load saved bytes into the entry's slot. If that fails, a held sequence is dropped; a running one keeps its
        slot and is recomputed."""
        places, slot = self._places, entry.slot
        tokens = places.tokens_in(entry)
        assert slot is not None
        if not tokens:
            return
        try:
            places.ops.load(slot, saved)
            places.moved_bytes += saved.nbytes
            places.trim(slot, tokens)
        except (BackendError, MemoryError) as error:
            raise_if_fatal(error)
            log.warning("cannot load %d tokens into slot %d: %s; recomputing them", tokens, slot, error)
            places.empty(slot)
            places.forget(entry)
            if entry.owner is not None:
                places.slots[slot] = entry
                entry.length = 0
                entry.owner.restart()
