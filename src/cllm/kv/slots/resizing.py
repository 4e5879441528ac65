"""Changing the number of slots: save their contents, have the backend reallocate, load them again."""

from __future__ import annotations

import logging
from operator import attrgetter

import numpy as np

from cllm.errors import BackendError
from cllm.kv.ops import SavedKV
from cllm.kv.slots.index import CacheEntry
from cllm.kv.slots.memory import SlotMemory

log = logging.getLogger("cllm.kv")

NO_MEMORY = "not enough memory for %d slots instead of %d: %s"

_NOTHING: SavedKV = np.empty(0, np.uint8)


class SlotResizing(SlotMemory):
    def _resize(self, slots: int) -> bool:
        """Have `slots` slots from now on. Running sequences go on; held ones that find no slot are saved.

        The backend frees its memory before it allocates anew. In between, the slots' contents are bytes for which the
        store makes room, so the budget is never exceeded. False: it could not be done, and whatever ran still runs.
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
        # Assign all slots first: whatever fails from here on, every sequence is in a slot and can be found there.
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
            log.info("KV slots: %d (before: %d)", now, before)
        return now == slots

    def _carry_out(self, slots: int) -> list[tuple[CacheEntry, SavedKV]] | None:
        """The contents of at most `slots` slots as bytes, running ones first. None: they cannot be saved within the
        budget, or at all."""
        limit = self._store_bytes + (self._geometry.slots - max(slots, len(self._slots))) * self._slot_bytes
        staying = [entry for entry in self._slots if entry is not None and entry.owner is not None]
        needed = sum(self._most_bytes(entry) for entry in staying)
        while slots > len(self._slots) and needed > limit - self._reserved_bytes and self._pins.give_way():
            pass
        limit -= self._reserved_bytes
        if needed > limit:
            log.warning("cannot resize to %d slots: saving takes %d bytes, there is room for %d", slots, needed, limit)
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
        carried: list[tuple[CacheEntry, SavedKV]] = []
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
        """Allocate `slots` slots, or else as many as `before`; returns how many there are."""
        try:
            self._ops.resize(slots)
        except (BackendError, MemoryError) as error:
            log.warning(NO_MEMORY, slots, before, error)
        else:
            return slots
        try:
            self._ops.resize(before)
        except (BackendError, MemoryError) as error:
            raise BackendError(f"cannot allocate {before} slots again: {error}", fatal=True) from error
        return before

    def _carry_in(self, entry: CacheEntry, saved: SavedKV) -> None:
        """Load saved bytes into the entry's slot. If that fails, a held sequence is dropped; a running one keeps its
        slot and is recomputed."""
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
            log.warning("cannot load %d tokens into slot %d: %s; recomputing them", tokens, slot, error)
            self._empty(slot)
            self._index.remove(entry)
            if entry.owner is not None:
                self._slots[slot] = entry
                entry.length = 0
                entry.owner.restart()
