"""Room in slots and store: every slot is filled or emptied here, and saved sequences are evicted here.

evict ──► offload.before_eviction: to disk, if worth it ──► store and index forget the sequence ──► told
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cllm.errors import BackendError
from cllm.kv.manager import EvictionListener
from cllm.kv.ops import SavedKV
from cllm.kv.slots.index import CacheEntry
from cllm.kv.slots.offload import SequenceOffload
from cllm.kv.slots.places import SlotPlaces, raise_if_fatal

log = logging.getLogger("cllm.kv")

SAVE_TAIL_TOKENS = 16
"""A held sequence whose slot is reused is saved first if at least this many of its tokens would be lost."""


class SlotRoom:
    def __init__(
        self, places: SlotPlaces, offload: SequenceOffload, *, told: EvictionListener, clock: Callable[[], float]
    ) -> None:
        self.evictions = 0
        self._places = places
        self._offload = offload
        self._told = told
        self._clock = clock
        self._in_hand: SavedKV | None = None
        """Bytes being loaded into a slot; they may be evicted from the store meanwhile."""

    def bring(self, source: CacheEntry, slot: int, cached: int, space: bytes) -> bool:
        """Put the first `cached` tokens of `source` into `slot` for a sequence of `space`. False: the backend failed,
        and the slot is empty."""
        places, saved = self._places, source.saved
        source.hits += 1
        snapshot = places.snapshots.deepest(source.snapshots, cached) if cached != source.goes_on_from else None
        state = None  # held by us: making room may cost the snapshot its bytes
        if snapshot is not None:
            state = snapshot.saved
            places.snapshots.use(snapshot)
        try:
            if source.slot == slot:
                # A sequence of another space does not replace the source, which others still look for.
                needed = source.length - cached >= SAVE_TAIL_TOKENS or source.space != space
                if not (needed and self._save(source)):
                    places.forget(source)
                places.slots[slot] = None
            elif source.slot is not None:
                self.vacate(slot)
                places.copy(source.slot, slot, source.length)
            else:
                self._load(source, slot)
            places.trim(slot, cached, state)
        except (BackendError, MemoryError) as error:
            raise_if_fatal(error)
            log.warning("cannot load %d cached tokens into slot %d: %s; recomputing them", cached, slot, error)
            if saved is not None:
                places.discard(source)
            places.empty(slot)
            return False
        return True

    def _load(self, source: CacheEntry, slot: int) -> None:
        places, saved = self._places, source.saved
        assert saved is not None
        if not source.pinned:
            places.store.touch(source)
        self._in_hand = saved
        try:
            self.vacate(slot)
            places.ops.load(slot, saved)
        finally:
            self._in_hand = None
        places.moved_bytes += saved.nbytes

    def vacate(self, slot: int) -> None:
        """Empty a slot that is not running; its content moves to the store if there is room."""
        entry = self._places.slots[slot]
        if entry is not None:
            if not self._save(entry):
                self._places.forget(entry)
            self._places.empty(slot)

    # -- store -------------------------------------------------------------------------------------------------

    def _save(self, entry: CacheEntry) -> bool:
        """Save a held sequence to the store; the caller empties its slot. False: there is no room."""
        places, needed = self._places, self._places.saved_bytes(entry)
        if needed + places.reserved_bytes > places.store_bytes or not self.make_room(needed, places.store_bytes):
            return False
        saved = places.read(entry)
        if saved is None:
            return False
        places.store.add(entry, saved)
        return True

    def make_room(self, needed: int, limit: int) -> bool:
        """Evict saved sequences, and then snapshots of others, until `needed` more bytes keep the store within `limit`.
        False: that was not enough."""
        places, store = self._places, self._places.store
        limit -= needed + places.reserved_bytes
        if places.evictable_bytes <= limit:
            return True
        started = self._clock()
        before = store.tokens
        while places.evictable_bytes > limit and len(store):
            self.evict(store.next_to_go())
        while places.evictable_bytes > limit and places.snapshots.give_up_oldest():
            pass
        self._told(before - store.tokens, self._clock() - started)
        return places.evictable_bytes <= limit

    def evict(self, entry: CacheEntry) -> None:
        self._offload.before_eviction(entry, in_use=entry.saved is self._in_hand)
        self.evictions += entry.length
        self._places.discard(entry)
