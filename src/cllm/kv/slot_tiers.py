"""The slots manager and the disk: whole sequences, saved while nothing runs, and loaded into the store.

Saving a sequence takes the backend milliseconds that cannot be had in parts, so it is done when it is quiet, and at the
end. One that is loaded has the tokens of whoever asked for it, as far as they agree; what follows in its bytes is cut
off when it is brought into a slot.
"""

from __future__ import annotations

from time import monotonic, sleep
from typing import Any

import numpy as np

from cllm.errors import BackendError
from cllm.kv.disk.store import Space
from cllm.kv.holders import Entry
from cllm.kv.loads import NOTHING, Incoming, Load
from cllm.kv.memory import most_bytes
from cllm.kv.radix import TOKEN_BYTES
from cllm.kv.sequence import KVSequence
from cllm.kv.slot_operations import SlotOperations
from cllm.kv.tier import Tier
from cllm.kv.tiered import Tiered

QUIET_S = 0.5
"""After the last sequence has ended, until saving begins."""

RETRY_S = 1.0
"""While the disk takes nothing."""


class SlotTiers(SlotOperations, Tiered):
    _keep_at: float | None = None
    """When sequences are to be saved; None: there are none."""

    # -- bringing ----------------------------------------------------------------------------------------------

    def _look(self, tier: Tier, sequence: KVSequence) -> Load | None:
        space = tier.space
        if space is None:
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

    def _land(self, tier: Tier, load: Load) -> None:
        holder, ticket, (saved,) = load.holder, load.ticket, load.buffers
        assert holder is not None and ticket is not None
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
            self._keep_at = self._clock() + QUIET_S

    def _keep(self, budget_s: float) -> bool:
        """Take in what came; save a sequence if it is quiet. True: there may be more to save."""
        if self._tier is None:
            return False
        self._tier.token_s = self.token_s
        self._say_whether_busy(bool(self._running_slots()))
        self._take_in()
        now = self._clock()
        if self._keep_at is None or now < self._keep_at or budget_s <= 0 or self._running_slots():
            return False
        kept = self._keep_one(self._tier)
        if kept is None:
            self._keep_at = None
        elif not kept:
            self._keep_at = now + RETRY_S
        return bool(kept)

    def _keep_one(self, tier: Tier) -> bool | None:
        """Hand one sequence over. False: there is no room for it now; None: there is none that is worth it."""
        space = tier.space
        if space is None or not tier.pays:
            return None
        for entry in [*self._held_in_slots(), *self._store.entries]:
            if entry.offered or not self._worth(tier, entry):
                continue
            if space.room() < most_bytes(entry.length, self._bytes_per_token):
                return False
            entry.offered = True
            try:
                self._hand_over(tier, space, entry)
            except BackendError as error:
                if error.fatal:
                    raise
                tier.fault("keeping a sequence on disk", error)
            except Exception as error:
                tier.fault("keeping a sequence on disk", error)
            return True
        return None

    def _worth(self, tier: Tier, entry: Entry) -> bool:
        """It is long, or was used again."""
        least = tier.least_blocks if entry.hits else max(tier.least_blocks, tier.worth_blocks)
        return entry.length >= least * tier.block_tokens

    def _hand_over(self, tier: Tier, space: Space, entry: Entry) -> None:
        tokens = b"".join(bytes(node.key) for node in reversed(list(entry.path())))
        names = tier.names(space, entry.space, tokens)
        found = space.find_sequence(names, tokens)
        if found is not None and found.matched * TOKEN_BYTES == len(tokens):
            return
        # What is in the store changes a little when it is loaded, and the disk's must not.
        payload = self._read(entry) if entry.saved is None else entry.saved.copy()
        if payload is not None and space.put_sequence(names, tokens, payload):
            tier.worked()

    def _disk_due_at(self) -> float | None:
        moments = (super()._disk_due_at(), self._keep_at if not self._running_slots() else None)
        return min((moment for moment in moments if moment is not None), default=None)

    def wind_up(self, seconds: float) -> None:
        if self._tier is None:
            return
        until = monotonic() + seconds
        self._tier.token_s = self.token_s
        while self._keep_at is not None and monotonic() < until and not self._tier.store.writer.trouble:
            kept = self._keep_one(self._tier)
            if kept is None:
                self._keep_at = None
            elif not kept:
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
