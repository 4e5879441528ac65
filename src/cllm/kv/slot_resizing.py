"""Another number of slots: the backend's memory is given back and taken anew, and what was in it waits as bytes."""

from __future__ import annotations

import logging
from operator import attrgetter

import numpy as np

from cllm.errors import BackendError
from cllm.kv.holders import Entry
from cllm.kv.ops import SavedKV
from cllm.kv.slot_pins import SlotPins

log = logging.getLogger("cllm.kv")

NO_MEMORY = "there is no memory for %d slots instead of %d: %s"

_NOTHING: SavedKV = np.empty(0, np.uint8)


class SlotResizing(SlotPins):
    def _resize(self, slots: int) -> bool:
        """Have so many slots from now on. What runs goes on; what is held and finds no slot is saved.

        The backend's memory is given back before it takes the new one. In between, what is in slots waits as bytes,
        for which the store makes room, so the budget is never passed. False: it could not be done, and whatever ran
        runs.
        """
        before = len(self._slots)
        if slots > before and (reason := self._ops.no_room(slots)) is not None:
            log.warning(NO_MEMORY, slots, before, reason)
            self._resizes_failed += 1
            return False
        carried = self._carry_out(slots)
        if carried is None:
            self._resizes_failed += 1
            return False
        now = self._reopen(slots, before)
        self._slots = [None] * now
        # All get their places first: whatever fails from here on, every sequence is in a slot and can be found there.
        for number, (entry, _) in enumerate(carried):
            self._slots[number] = entry
            entry.slot = number
            if entry.owner is not None:
                entry.owner.slot = number
        while carried:
            self._carry_in(*carried.pop())
        self._resizes += now != before
        self._resizes_failed += now != slots
        self._released_bytes += max(0, before - now) * self._slot_bytes
        if now != before:
            log.info("the KV memory has %d slots now instead of %d", now, before)
        return now == slots

    def _carry_out(self, slots: int) -> list[tuple[Entry, SavedKV]] | None:
        """The content of the slots as bytes, for at most `slots` of them; what runs comes first. None: it cannot be
        saved within the budget, or not at all."""
        limit = self._store_bytes + (self._geometry.slots - max(slots, len(self._slots))) * self._slot_bytes
        staying = [entry for entry in self._slots if entry is not None and entry.owner is not None]
        needed = sum(self._most_bytes(entry) for entry in staying)
        while slots > len(self._slots) and needed > limit - self._reserved_bytes and self._pins.give_way():
            pass
        limit -= self._reserved_bytes
        if needed > limit:
            log.warning("%d bytes that run cannot be moved to %d slots: there is room for %d", needed, slots, limit)
            return None
        leaving: list[int] = []
        for entry in sorted(self._held_in_slots(), key=attrgetter("number"), reverse=True):
            size = self._most_bytes(entry)
            if len(staying) < slots and needed + size <= limit:
                staying.append(entry)
                needed += size
            elif entry.slot is not None:
                leaving.append(entry.slot)
        for slot in reversed(leaving):  # the oldest first, and so they are evicted
            self._vacate(slot)
        self._make_room(needed, limit + self._reserved_bytes)
        carried: list[tuple[Entry, SavedKV]] = []
        for entry in staying:
            saved = self._read(entry) if self._tokens_in(entry) else _NOTHING
            if saved is not None:
                carried.append((entry, saved))
            elif entry.owner is not None:
                return None
            else:
                self._discard(entry)
        return carried

    def _reopen(self, slots: int, before: int) -> int:
        """Take memory for `slots`, or else for as many as there were `before`; returns how many there are."""
        try:
            self._ops.resize(slots)
        except (BackendError, MemoryError) as error:
            log.warning(NO_MEMORY, slots, before, error)
        else:
            return slots
        try:
            self._ops.resize(before)
        except (BackendError, MemoryError) as error:
            raise BackendError(f"the memory of {before} slots could not be taken again: {error}", fatal=True) from error
        return before

    def _carry_in(self, entry: Entry, saved: SavedKV) -> None:
        """Load what was carried out into the entry's slot. If that fails, what is held is dropped; what runs has its
        slot and nothing computed, and so is computed again."""
        slot, tokens = entry.slot, self._tokens_in(entry)
        assert slot is not None
        if not tokens:
            return
        try:
            self._ops.load(slot, saved)
            self._moved_bytes += saved.nbytes
            self._trim(slot, tokens)
        except (BackendError, MemoryError) as error:
            if isinstance(error, BackendError) and error.fatal:
                raise
            log.warning("%d tokens cannot be loaded into slot %d: %s; they are computed again", tokens, slot, error)
            self._empty(slot)
            self._index.remove(entry)
            if entry.owner is not None:
                self._slots[slot] = entry
                entry.length = 0
                entry.owner.restart()
