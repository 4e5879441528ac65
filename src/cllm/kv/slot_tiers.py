"""The slots manager and the disk: whole sequences, handed over when it is quiet or they leave, loaded into the store.

Saving a sequence takes the backend milliseconds that cannot be had in parts, so it is done when it is quiet, and at the
end; while others run only if it is short, and seldom. One that is evicted from the store is bytes already, which cost
nothing to hand over. One that is loaded has the tokens of whoever asked for it, as far as they agree; what follows in
its bytes is cut off when it is brought into a slot.
"""

from __future__ import annotations

import math
from time import monotonic, sleep
from typing import Any

import numpy as np

from cllm.kv.disk.reader import Ticket
from cllm.kv.disk.store import Space
from cllm.kv.holders import Entry
from cllm.kv.loads import NOTHING, Incoming, Load
from cllm.kv.memory import most_bytes
from cllm.kv.ops import SavedKV
from cllm.kv.radix import TOKEN_BYTES
from cllm.kv.sequence import KVSequence
from cllm.kv.slot_operations import SlotOperations
from cllm.kv.tier import Tier
from cllm.kv.tiered import Tiered

QUIET_S = 0.5
"""After the last sequence has ended, until saving begins."""

RETRY_S = 1.0
"""While the disk takes nothing."""

STOOD_S = 2.0
"""After the first sequence has ended that is not saved yet, until saving begins though others run,"""
LONGEST_S = 0.02
"""of sequences for which it takes no longer than this: what runs waits so long for its next token,"""
BUSY_SHARE = 0.005
"""and for this share of the time: of a hundred tokens, fewer than one is late."""

FIRST_GUESS = 1e9
"""Bytes a second that are saved or copied, until that was timed."""
LEARNING = 0.25


class Speed:
    """How fast sequences become bytes that are ours to give away."""

    def __init__(self) -> None:
        self._bytes_per_s = FIRST_GUESS

    def seconds(self, size: int) -> float:
        return size / self._bytes_per_s

    def learn(self, size: int, seconds: float) -> None:
        if seconds > 0:
            self._bytes_per_s += LEARNING * (size / seconds - self._bytes_per_s)


class SlotTiers(SlotOperations, Tiered):
    _keep_at: float | None = None
    """When sequences are to be saved; None: there are none."""
    _busy_at: float | None = None
    """When one of them is to be saved though others run; None: there is none that may be."""

    def use_disk(self, tier: Tier) -> None:
        super().use_disk(tier)
        self._known = False
        self._slot_speed, self._store_speed = Speed(), Speed()

    # -- bringing ----------------------------------------------------------------------------------------------

    def _look(self, sequence: KVSequence) -> Load | None:
        tier = self._tier
        space = None if tier is None else tier.space
        if tier is None or space is None:
            return None
        key = sequence.prefix.tobytes()[:-TOKEN_BYTES]
        cached = self._index.find(key, sequence.space)[0]
        size = tier.block_tokens
        if len(key) // TOKEN_BYTES - cached < tier.least_blocks * size:
            return NOTHING
        names = tier.names(space, sequence.space, key)
        found = space.find_sequence(names, key)
        if found is None or found.nbytes + self._reserved_bytes > self._store_bytes:
            return NOTHING
        wanted = names[: found.matched // size]
        for load in self._loads:
            if wanted[-1] in load.names:
                return load
        patience = tier.patience((found.matched - cached) // size, found.nbytes)
        if patience is None:
            return NOTHING
        holder = Incoming(sequence.tokens[: found.matched], space=sequence.space)
        load = Load(sequence, holder, names=wanted, until=self._clock() + patience)
        self._make_room(found.nbytes, self._store_bytes)
        try:
            load.buffers = [np.empty(found.nbytes, np.uint8)]
            load.ticket = space.load_sequence(found, load.buffers[0], lambda _: tier.tell())
        except Exception as error:
            tier.fault("loading a sequence from disk", error)
            return NOTHING
        self._coming_bytes += found.nbytes
        self._loads.append(load)
        return load

    def _land(self, load: Load) -> None:
        tier, holder, ticket, (saved,) = self._tier, load.holder, load.ticket, load.buffers
        assert tier is not None and holder is not None and isinstance(ticket, Ticket)
        load.end()
        self._coming_bytes -= saved.nbytes
        tokens = len(holder.tokens)
        tier.note_load(tokens if ticket.complete else 0, tokens)
        if not ticket.complete:
            return
        tier.worked()
        holder.num_computed = tokens
        entry = Entry(0, holder)
        entry.hits, entry.offered = 1, True
        self._index.extend(entry, holder)
        entry.owner = None
        self._store.add(entry, saved)
        for other in self._index.covered_by(entry):
            if other.owner is None:
                self._discard(other)

    # -- keeping -----------------------------------------------------------------------------------------------

    def _note_end(self) -> None:
        """A sequence has ended: it may be worth a place on disk."""
        if self._tier is not None:
            now = self._clock()
            self._keep_at = now + QUIET_S
            if self._busy_at is None:
                self._busy_at = now + STOOD_S

    def _keep(self, budget_s: float) -> bool:
        """Take in what came; save a sequence if it is quiet, or takes little. True: there may be more to save."""
        tier = self._tier
        if tier is None:
            return False
        self._tell_speed()
        self._say_whether_busy(bool(self._running_slots()))
        self._take_in()
        known = tier.space is not None
        if known and not self._known and self._keep_at is None:
            self._note_end()  # what ended before has waited for this
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

    def _keep_one(self, tier: Tier, most_s: float) -> bool | None:
        """Hand one sequence over, which takes so long at most. False: there is no room for it now; None: there is none
        that is worth it."""
        space = tier.space
        if space is None or not tier.pays:
            return None
        for entry in [*self._held_in_slots(), *self._store.entries]:
            size = most_bytes(entry.length, self._bytes_per_token)
            if entry.offered or not self._worth(tier, entry) or self._speed_of(entry).seconds(size) > most_s:
                continue
            if space.room() < size:
                return False
            self._hand_over(tier, space, entry)
            return True
        return None

    def _evict(self, entry: Entry) -> None:
        tier = self._tier
        if tier is not None and not entry.offered and self._worth(tier, entry) and tier.pays:
            space = tier.space
            if space is not None:
                self._hand_over(tier, space, entry, leaves=True)
        super()._evict(entry)

    def _speed_of(self, entry: Entry) -> Speed:
        return self._slot_speed if entry.saved is None else self._store_speed

    def _worth(self, tier: Tier, entry: Entry) -> bool:
        """It is long, or was used again."""
        least = tier.least_blocks if entry.hits else max(tier.least_blocks, tier.worth_blocks)
        return entry.length >= least * tier.block_tokens

    def _hand_over(self, tier: Tier, space: Space, entry: Entry, *, leaves: bool = False) -> None:
        """Once, whatever comes of it. One that `leaves` the store gives its bytes away."""
        entry.offered = True
        tokens = b"".join(bytes(node.key) for node in reversed(list(entry.path())))
        try:
            names = tier.names(space, entry.space, tokens)
            found = space.find_sequence(names, tokens)
            if found is not None and found.matched * TOKEN_BYTES == len(tokens):
                return
            payload = self._payload(entry, leaves)
            if payload is not None and space.put_sequence(names, tokens, payload):
                tier.worked()
        except Exception as error:
            tier.fault("keeping a sequence on disk", error)

    def _payload(self, entry: Entry, leaves: bool) -> SavedKV | None:
        """Bytes that nobody changes any more: what is in the store changes a little whenever it is loaded."""
        if leaves and entry.saved is not None and entry.saved is not self._in_hand:
            return entry.saved
        speed, started = self._speed_of(entry), self._clock()
        payload = self._read(entry) if entry.saved is None else entry.saved.copy()
        if payload is not None:
            speed.learn(payload.nbytes, self._clock() - started)
        return payload

    def _disk_due_at(self) -> float | None:
        moments = (super()._disk_due_at(), self._keep_at if not self._running_slots() else None)
        return min((moment for moment in moments if moment is not None), default=None)

    def wind_up(self, seconds: float) -> None:
        if self._tier is None:
            return
        until = monotonic() + seconds
        self._say_whether_busy(False)
        self._tell_speed()
        while monotonic() < until and not self._tier.store.writer.trouble:
            kept = self._keep_one(self._tier, math.inf)
            if kept is None:
                break
            if not kept:
                self._tier.store.flush(max(0.0, min(0.1, until - monotonic())))
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
