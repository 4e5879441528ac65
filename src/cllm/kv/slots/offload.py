"""Which sequences the slots manager writes to disk, and when.

Saving a sequence takes the backend milliseconds and cannot be interrupted, so it happens when it is quiet and at
shutdown; while others run, only short ones and seldom. A sequence evicted from the store is bytes already and costs
nothing to hand over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic, sleep

from cllm.kv.block_names import chain, root_name
from cllm.kv.disk.store import ModelStore
from cllm.kv.ops import SavedKV
from cllm.kv.radix import TOKEN_BYTES
from cllm.kv.slots.index import CacheEntry
from cllm.kv.slots.packing import MOST_PACKED, pack
from cllm.kv.slots.places import SlotPlaces
from cllm.kv.throughput import RecentThroughput
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.kv.tiers.tiers import Tiers

QUIET_S = 0.5
"""Saving begins this long after the last sequence has ended."""

RETRY_S = 1.0
"""Pause while the disk takes nothing."""

STOOD_S = 2.0
"""While others run, saving begins this long after the first unsaved sequence has ended."""

LONGEST_S = 0.02
"""While others run, only sequences are saved that take at most this long: it delays the next token of the others."""

BUSY_SHARE = 0.005
"""The share of the time that saving takes while others run: fewer than one token in a hundred is late."""

FIRST_GUESS = 1e9
"""Bytes per second saved or copied, until that was timed."""


class SequenceOffload:
    def __init__(self, places: SlotPlaces, tiers: Tiers, clock: Callable[[], float]) -> None:
        self._places = places
        self._tiers = tiers
        self._clock = clock
        self._known = False
        """Whether the model's part of the disk could be used last time."""
        self._slot_speed, self._store_speed = RecentThroughput(FIRST_GUESS), RecentThroughput(FIRST_GUESS)
        self._keep_at: float | None = None
        """When to save sequences; None: there are none."""
        self._busy_at: float | None = None
        """When to save one of them while others run; None: none qualifies."""

    def note_end(self) -> None:
        """A sequence has ended: it may be worth writing to disk."""
        if self._tiers.disk is not None:
            now = self._clock()
            self._keep_at = now + QUIET_S
            if self._busy_at is None:
                self._busy_at = now + STOOD_S

    def before_eviction(self, entry: CacheEntry, *, in_use: bool) -> None:
        """A saved sequence is about to go. `in_use`: somebody else changes its bytes."""
        disk, model_store = self._tiers.disk, self._tiers.model_store
        if (
            disk is not None
            and model_store is not None
            and not entry.offered
            and self._worth(disk, entry)
            and disk.pays
        ):
            self._hand_over(disk, model_store, entry, entry.saved if not in_use else None)

    # -- between steps -----------------------------------------------------------------------------------------

    def work(self, budget_s: float) -> bool:
        """Save a sequence if it is quiet or quick. True: there may be more to save."""
        busy, now = bool(self._places.running_slots()), self._clock()
        self._tiers.throttle_writes(busy)
        known = self._tiers.model_store is not None
        if known and not self._known and self._keep_at is None:
            self.note_end()  # sequences that ended before have waited for this
        self._known = known
        due = self._busy_at if busy else self._keep_at
        if due is None or now < due or budget_s <= 0:
            return False
        kept = self._keep_one(LONGEST_S if busy else math.inf)
        if busy:
            pause = (self._clock() - now) / BUSY_SHARE
            self._busy_at = None if kept is None else now + (pause if kept else RETRY_S)
            return False
        if kept is None:
            self._keep_at = None
        elif not kept:
            self._keep_at = now + RETRY_S
        return bool(kept)

    def due_at(self) -> float | None:
        return self._keep_at if not self._places.running_slots() else None

    def drain(self, seconds: float) -> None:
        self._tiers.throttle_writes(False)
        until, disk = monotonic() + seconds, self._tiers.disk
        while disk is not None and monotonic() < until and not disk.store.writer.trouble:
            kept = self._keep_one(math.inf)
            if kept is None:
                break
            if not kept:
                disk.store.flush(max(0.0, min(0.1, until - monotonic())))
                sleep(0.001)

    def _keep_one(self, most_s: float) -> bool | None:
        """Hand over one sequence, which takes at most `most_s`. False: the disk has no room now; None: none is worth
        it."""
        places, disk, model_store = self._places, self._tiers.disk, self._tiers.model_store
        if disk is None or model_store is None or not disk.pays:
            return None
        for entry in [*places.held_in_slots(), *places.store]:
            size = places.saved_bytes(entry) + MOST_PACKED * places.state_bytes
            if entry.offered or not self._worth(disk, entry) or self._speed_of(entry).seconds(size) > most_s:
                continue
            if model_store.room() < size:
                return False
            self._hand_over(disk, model_store, entry)
            return True
        return None

    def _speed_of(self, entry: CacheEntry) -> RecentThroughput:
        return self._slot_speed if entry.saved is None else self._store_speed

    def _worth(self, disk: DiskTier, entry: CacheEntry) -> bool:
        """Whether it is worth writing: long, or reused."""
        least = disk.least_blocks if entry.hits else max(disk.least_blocks, disk.worth_blocks)
        return entry.length >= least * disk.block_tokens

    def _hand_over(
        self, disk: DiskTier, model_store: ModelStore, entry: CacheEntry, payload: SavedKV | None = None
    ) -> None:
        """Hand an entry to the disk; tried once, whatever the outcome. `payload`: its bytes, if nobody needs them any
        more."""
        entry.offered = True
        tokens = b"".join(bytes(node.key) for node in reversed(list(entry.path())))
        try:
            names = chain(root_name(entry.space), tokens, disk.block_tokens)
            found = model_store.find_sequence(names, tokens)
            if found is not None and found.matched * TOKEN_BYTES == len(tokens):
                return
            if payload is None or self._places.ops.carries_state:
                payload = self._copy_of(entry)
            if payload is not None and model_store.put_sequence(names, tokens, payload):
                disk.worked()
        except Exception as error:
            disk.fault("keeping a sequence on disk", error)

    def _copy_of(self, entry: CacheEntry) -> SavedKV | None:
        """Bytes that nobody changes any more: loading a stored sequence modifies its bytes."""
        speed, started, places = self._speed_of(entry), self._clock(), self._places
        payload = places.read(entry) if entry.saved is None else entry.saved
        if payload is not None:
            if places.ops.carries_state:
                states = {place: each.saved for place, each in entry.snapshots.items() if each in places.snapshots}
                payload = pack(payload, entry.end or entry.length, states)
            elif entry.saved is not None:
                payload = payload.copy()
            speed.add(payload.nbytes, self._clock() - started)
        return payload
