"""The slots manager and the disk: whole sequences, written when it is quiet or when evicted, loaded into the store.

Saving a sequence takes the backend milliseconds and cannot be interrupted, so it happens when it is quiet and at
shutdown; while others run, only short ones and seldom. A sequence evicted from the store is bytes already and costs
nothing to hand over. A loaded one is indexed by the tokens it shares with the request; the rest of its bytes is cut off
when it moves to a slot.
"""

from __future__ import annotations

import math
from time import monotonic, sleep
from typing import Any

import numpy as np

from cllm.kv.disk.reader import ReadTicket
from cllm.kv.disk.store import ModelStore
from cllm.kv.memory import most_bytes
from cllm.kv.ops import SavedKV
from cllm.kv.radix import TOKEN_BYTES
from cllm.kv.sequence import KVSequence
from cllm.kv.slots.index import CacheEntry
from cllm.kv.slots.resizing import SlotResizing
from cllm.kv.throughput import RecentThroughput
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.kv.tiers.loads import NO_LOAD, Load, LoadingSequence
from cllm.kv.tiers.manager import TieredKVManager

QUIET_S = 0.5
"""Saving begins this long after the last sequence has ended."""

RETRY_S = 1.0
"""Pause while the disk takes nothing."""

STOOD_S = 2.0
"""While others run, saving begins this long after the first unsaved sequence has ended,"""
LONGEST_S = 0.02
"""for sequences that take at most this long, which delays the next token of those that run,"""
BUSY_SHARE = 0.005
"""and for this share of the time: fewer than one token in a hundred is late."""

FIRST_GUESS = 1e9
"""Bytes per second saved or copied, until that was timed."""


class SlotOffload(SlotResizing, TieredKVManager):
    _keep_at: float | None = None
    """When to save sequences; None: there are none."""
    _busy_at: float | None = None
    """When to save one of them while others run; None: none qualifies."""

    def use_disk(self, tier: DiskTier) -> None:
        super().use_disk(tier)
        self._known = False
        self._slot_speed, self._store_speed = RecentThroughput(FIRST_GUESS), RecentThroughput(FIRST_GUESS)

    # -- loading -----------------------------------------------------------------------------------------------

    def _find_load(self, sequence: KVSequence) -> Load | None:
        tier = self._disk
        model_store = None if tier is None else tier.model_store
        if tier is None or model_store is None:
            return None
        key = sequence.prefix.tobytes()[:-TOKEN_BYTES]
        cached = self._index.find(key, sequence.space)[0]
        size = tier.block_tokens
        if len(key) // TOKEN_BYTES - cached < tier.least_blocks * size:
            return NO_LOAD
        names = tier.names(model_store, sequence.space, key)
        found = model_store.find_sequence(names, key)
        if found is None or found.nbytes + self._reserved_bytes > self._store_bytes:
            return NO_LOAD
        wanted = names[: found.matched // size]
        for load in self._loads:
            if wanted[-1] in load.names:
                return load
        wait_s = tier.wait_limit((found.matched - cached) // size, found.nbytes)
        if wait_s is None:
            return NO_LOAD
        holder = LoadingSequence(sequence.tokens[: found.matched], space=sequence.space)
        load = Load(sequence, holder, names=wanted, deadline=self._clock() + wait_s)
        self._make_room(found.nbytes, self._store_bytes)
        try:
            load.buffers = [np.empty(found.nbytes, np.uint8)]
            load.transfer = model_store.load_sequence(found, load.buffers[0], lambda _: tier.notify())
        except Exception as error:
            tier.fault("loading a sequence from disk", error)
            return NO_LOAD
        self._coming_bytes += found.nbytes
        self._loads.append(load)
        return load

    def _finish_load(self, load: Load) -> None:
        tier, holder, transfer, (saved,) = self._disk, load.holder, load.transfer, load.buffers
        assert tier is not None and holder is not None and isinstance(transfer, ReadTicket)
        load.end()
        self._coming_bytes -= saved.nbytes
        tokens = len(holder.tokens)
        tier.note_load(tokens if transfer.complete else 0, tokens)
        if not transfer.complete:
            return
        tier.worked()
        holder.num_computed = tokens
        entry = CacheEntry(0, holder)
        entry.hits, entry.offered = 1, True
        self._index.extend(entry, holder)
        entry.owner = None
        self._store.add(entry, saved)
        for other in self._index.covered_by(entry):
            if other.owner is None:
                self._discard(other)

    # -- offloading --------------------------------------------------------------------------------------------

    def _note_end(self) -> None:
        """A sequence has ended: it may be worth writing to disk."""
        if self._disk is not None:
            now = self._clock()
            self._keep_at = now + QUIET_S
            if self._busy_at is None:
                self._busy_at = now + STOOD_S

    def _keep(self, budget_s: float) -> bool:
        """Finish loads that have arrived; save a sequence if it is quiet or quick. True: there may be more to save."""
        tier = self._disk
        if tier is None:
            return False
        self._share_token_time()
        self._throttle_writes(bool(self._running_slots()))
        self._collect_loads()
        known = tier.model_store is not None
        if known and not self._known and self._keep_at is None:
            self._note_end()  # sequences that ended before have waited for this
        self._known = known
        busy, now = bool(self._running_slots()), self._clock()
        due = self._busy_at if busy else self._keep_at
        if due is None or now < due or budget_s <= 0:
            return False
        kept = self._keep_one(tier, LONGEST_S if busy else math.inf)
        if busy:
            pause = (self._clock() - now) / BUSY_SHARE
            self._busy_at = None if kept is None else now + (pause if kept else RETRY_S)
            return False
        if kept is None:
            self._keep_at = None
        elif not kept:
            self._keep_at = now + RETRY_S
        return bool(kept)

    def _keep_one(self, tier: DiskTier, most_s: float) -> bool | None:
        """Hand over one sequence, which takes at most `most_s`. False: the store has no room now; None: none is worth
        it."""
        model_store = tier.model_store
        if model_store is None or not tier.pays:
            return None
        for entry in [*self._held_in_slots(), *self._store.entries]:
            size = most_bytes(entry.length, self._bytes_per_token)
            if entry.offered or not self._worth(tier, entry) or self._speed_of(entry).seconds(size) > most_s:
                continue
            if model_store.room() < size:
                return False
            self._hand_over(tier, model_store, entry)
            return True
        return None

    def _evict(self, entry: CacheEntry) -> None:
        tier = self._disk
        if tier is not None and not entry.offered and self._worth(tier, entry) and tier.pays:
            model_store = tier.model_store
            if model_store is not None:
                self._hand_over(tier, model_store, entry, leaves=True)
        super()._evict(entry)

    def _speed_of(self, entry: CacheEntry) -> RecentThroughput:
        return self._slot_speed if entry.saved is None else self._store_speed

    def _worth(self, tier: DiskTier, entry: CacheEntry) -> bool:
        """Whether it is worth writing: long, or reused."""
        least = tier.least_blocks if entry.hits else max(tier.least_blocks, tier.worth_blocks)
        return entry.length >= least * tier.block_tokens

    def _hand_over(self, tier: DiskTier, model_store: ModelStore, entry: CacheEntry, *, leaves: bool = False) -> None:
        """Hand an entry to the disk; tried once, whatever the outcome. One that `leaves` the store gives its bytes
        away."""
        entry.offered = True
        tokens = b"".join(bytes(node.key) for node in reversed(list(entry.path())))
        try:
            names = tier.names(model_store, entry.space, tokens)
            found = model_store.find_sequence(names, tokens)
            if found is not None and found.matched * TOKEN_BYTES == len(tokens):
                return
            payload = self._payload(entry, leaves)
            if payload is not None and model_store.put_sequence(names, tokens, payload):
                tier.worked()
        except Exception as error:
            tier.fault("keeping a sequence on disk", error)

    def _payload(self, entry: CacheEntry, leaves: bool) -> SavedKV | None:
        """Bytes that nobody changes any more: loading a stored sequence modifies its bytes."""
        if leaves and entry.saved is not None and entry.saved is not self._in_hand:
            return entry.saved
        speed, started = self._speed_of(entry), self._clock()
        payload = self._read(entry) if entry.saved is None else entry.saved.copy()
        if payload is not None:
            speed.add(payload.nbytes, self._clock() - started)
        return payload

    def _disk_due_at(self) -> float | None:
        moments = (super()._disk_due_at(), self._keep_at if not self._running_slots() else None)
        return min((moment for moment in moments if moment is not None), default=None)

    def drain(self, seconds: float) -> None:
        if self._disk is None:
            return
        until = monotonic() + seconds
        self._throttle_writes(False)
        self._share_token_time()
        while monotonic() < until and not self._disk.store.writer.trouble:
            kept = self._keep_one(self._disk, math.inf)
            if kept is None:
                break
            if not kept:
                self._disk.store.flush(max(0.0, min(0.1, until - monotonic())))
                sleep(0.001)
        self._end_loads(seconds)

    def _store_details(self) -> dict[str, Any]:
        return {
            "sequences": len(self._store),
            "tokens": self._store.tokens,
            "bytes": self._store.bytes,
            "coming_bytes": self._coming_bytes,
            "capacity_bytes": self._store_bytes,
        }
