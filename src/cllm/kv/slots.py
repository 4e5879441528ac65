"""The slots manager, for a backend that keeps whole sequences by number (llama.cpp, split streams).

Two places hold computed sequences:

    slots   0    1    2    3  …        where a sequence must be to run; a finished one stays until its slot is wanted
          [run][run][held][free]
    store  ▒▒▒▒▒ ▒▒ ▒▒▒▒▒▒▒            sequences saved as bytes, each as large as its tokens, in order of eviction

A new sequence takes its longest cached prefix from wherever it is: it goes on in the slot that holds it, or the prefix
is copied from another slot (even a running one) or loaded from the store, and trimmed. Running slots are kept adjacent,
because the backend computes only adjacent slots together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cllm.kv.eviction import EvictionPolicy, make_policy
from cllm.kv.holders import Entry, HolderIndex
from cllm.kv.manager import KVManager, PositionMismatchError
from cllm.kv.ops import SlotGeometry, SlotOps
from cllm.kv.radix import TOKEN_BYTES
from cllm.kv.sequence import KVSequence
from cllm.kv.usage import KVUsage

SAVE_TAIL_TOKENS = 16
"""A held sequence whose slot is taken over is saved first if at least this many of its tokens would be lost."""

SAVED_TOKEN_OVERHEAD_BYTES = 16
SAVED_OVERHEAD_BYTES = 4096
"""Upper bounds of what a saved sequence needs beside its K/V: positions for every token, a header for the whole."""


class SlotKVManager(KVManager):
    def __init__(
        self,
        ops: SlotOps,
        geometry: SlotGeometry,
        *,
        bytes_per_token: int,
        store_bytes: int = 0,
        max_sequences: int | None = None,
        eviction_threshold: float = 1.0,
        eviction_policy: str = "lru",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_tokens = geometry.slot_tokens
        self._geometry = geometry
        self._ops = ops
        self._bytes_per_token = bytes_per_token
        self._store_bytes = store_bytes
        self._threshold_bytes = int(store_bytes * eviction_threshold)
        self._max_sequences = max_sequences
        self._clock = clock
        self._evictions = self._failures = self._queried = self._hit = self._moves = self._moved_bytes = 0
        self._peak = 0
        self._slots: list[Entry | None] = [None] * geometry.slots
        self._index = HolderIndex()
        self._store: EvictionPolicy[Entry] = make_policy(eviction_policy)
        self._stored_bytes = self._stored_tokens = 0

    # -- admission ---------------------------------------------------------------------------------------------

    def peek(self, key: bytes) -> int:
        return self._index.find(key[:-TOKEN_BYTES])[0]

    def admit(self, sequence: KVSequence) -> int | None:
        cached, holders = self._index.find(sequence.tokens.tobytes()[:-TOKEN_BYTES])
        source = min(holders, key=_preference) if cached else None
        slot = self._choose_slot(source)
        if slot is None:
            self._failures += 1
            return None
        if source is None:
            self._vacate(slot)
        else:
            source.hits += 1
            self._bring(source, slot, cached)
        self._occupy(slot, sequence, cached)
        self._queried += len(sequence.tokens)
        self._hit += cached
        return cached

    def fork(self, parent: KVSequence, child: KVSequence) -> bool:
        slot = self._choose_slot(None)
        if slot is None:
            self._failures += 1
            return False
        self._vacate(slot)
        self._copy(parent.slot, slot, parent.num_computed)
        self._occupy(slot, child, parent.num_computed)
        return True

    def arrange(self) -> None:
        """Move running sequences from the end into gaps, so that the backend computes them together."""
        running = self._running_slots()
        while running and running[-1] - running[0] + 1 > len(running):
            gap = next(number for number in range(running[0], running[-1]) if number not in running)
            entry = self._slots[running[-1]]
            assert entry is not None and entry.owner is not None and entry.slot is not None
            self._vacate(gap)
            self._copy(entry.slot, gap, entry.owner.num_computed)
            self._empty(entry.slot)
            self._slots[gap] = entry
            entry.slot = entry.owner.slot = gap
            self._moves += 1
            running = self._running_slots()

    def grow(self, sequence: KVSequence, count: int) -> bool:
        return sequence.num_computed + count <= self.max_tokens

    # -- after a step ------------------------------------------------------------------------------------------

    def commit(self, sequence: KVSequence) -> None:
        # Prompt chunks are indexed at once, for others to share; generated tokens when the sequence ends.
        if sequence.num_computed - sequence.entry.length > 1:
            self._index.extend(sequence.entry, sequence)

    def verify(self, sequence: KVSequence) -> None:
        held = self._ops.length(sequence.slot)
        if held != sequence.num_computed:
            raise PositionMismatchError(
                f"slot {sequence.slot} holds {held} positions, the sequence has computed {sequence.num_computed}"
            )

    def rewind(self, sequence: KVSequence) -> None:
        self._ops.remove(sequence.slot, sequence.num_computed)

    def release(self, sequence: KVSequence, *, keep: bool = True) -> None:
        entry: Entry = sequence.entry
        if keep and sequence.num_computed:
            self._index.extend(entry, sequence)
            entry.owner = None
            for other in self._index.covered_by(entry):
                if other.owner is None:
                    self._discard(other)
        else:
            self._discard(entry)
        sequence.entry = None
        sequence.slot = -1
        sequence.num_computed = 0

    # -- upkeep ------------------------------------------------------------------------------------------------

    def maintain(self, *, idle: bool) -> None:
        self._make_room(0, self._threshold_bytes)
        if self._max_sequences is not None:
            occupied = sum(entry is not None for entry in self._slots)
            while len(self._store) and len(self._store) + occupied > self._max_sequences:
                self._evict(self._store.peek())

    def reset(self) -> None:
        if self._running_slots():
            raise ValueError("sequences still hold slots")
        # What is saved is our own memory and survives; what was only in slots is gone.
        for entry in self._held_in_slots():
            self._index.remove(entry)
        self._slots = [None] * self._geometry.slots

    def usage(self) -> KVUsage:
        running = [entry.owner for entry in self._slots if entry is not None and entry.owner is not None]
        held = self._held_in_slots()
        referenced = sum(owner.num_computed for owner in running)
        evictable = sum(entry.length for entry in held) + self._stored_tokens
        total = self._geometry.tokens + self._store_bytes // self._bytes_per_token
        self._peak = max(self._peak, referenced)
        free_runs = "".join("." if entry is None else "x" for entry in self._slots).replace("x", " ").split()
        return KVUsage(
            layout="slots",
            unit_tokens=1,
            bytes_per_unit=self._bytes_per_token,
            total=total,
            free=total - evictable - referenced,
            evictable=evictable,
            referenced=referenced,
            peak=self._peak,
            sequences_running=len(running),
            sequences_held=len(held) + len(self._store),
            free_segments=len(free_runs),
            largest_free_span=max(map(len, free_runs), default=0) * self._geometry.slot_tokens,
            evictions=self._evictions,
            allocation_failures=self._failures,
            compactions=self._moves,
            moved_bytes=self._moved_bytes,
            query_tokens=self._queried,
            hit_tokens=self._hit,
        )

    def details(self) -> dict[str, Any]:
        return {
            "slots": [_describe(entry) for entry in self._slots],
            "slot_tokens": self._geometry.slot_tokens,
            "store": {
                "sequences": len(self._store),
                "tokens": self._stored_tokens,
                "bytes": self._stored_bytes,
                "capacity_bytes": self._store_bytes,
            },
        }

    def check(self) -> None:
        self._index.check()
        for number, entry in enumerate(self._slots):
            expected = 0
            if entry is not None:
                expected = entry.length if entry.owner is None else entry.owner.num_computed
                if entry.slot != number or entry.saved is not None:
                    raise AssertionError(f"slot {number} names a sequence that is elsewhere")
            if self._ops.length(number) != expected:
                raise AssertionError(f"slot {number} holds {self._ops.length(number)} positions, not {expected}")
        stored_tokens = stored_bytes = 0
        for entry in self._index.entries():
            if entry.saved is None:
                if entry.slot is None or self._slots[entry.slot] is not entry:
                    raise AssertionError("the index names a sequence that is nowhere")
                continue
            stored_tokens += entry.length
            stored_bytes += entry.saved.nbytes
            if entry.slot is not None or entry not in self._store:
                raise AssertionError("a saved sequence is in a slot, or not evictable")
        if (stored_tokens, stored_bytes) != (self._stored_tokens, self._stored_bytes):
            raise AssertionError(f"{stored_bytes} bytes are stored, {self._stored_bytes} counted")
        if stored_bytes > self._store_bytes:
            raise AssertionError(f"{stored_bytes} bytes are stored, {self._store_bytes} are allowed")

    # -- inside: slots -----------------------------------------------------------------------------------------

    def _choose_slot(self, source: Entry | None) -> int | None:
        """A slot that is not running, adjacent to the running ones, best the one that holds the prefix already."""
        candidates = self._adjacent_slots()
        if source is not None and source.slot in candidates:
            return source.slot
        for slot in candidates:
            if self._slots[slot] is None:
                return slot
        return candidates[0] if candidates else None

    def _adjacent_slots(self) -> list[int]:
        running = self._running_slots()
        if not running:
            return list(range(len(self._slots)))
        low, high = running[0], running[-1]
        if gaps := sorted(set(range(low, high)).difference(running)):
            return gaps
        return [slot for slot in (high + 1, low - 1) if 0 <= slot < len(self._slots)]

    def _running_slots(self) -> list[int]:
        return [number for number, entry in enumerate(self._slots) if entry is not None and entry.owner is not None]

    def _held_in_slots(self) -> list[Entry]:
        return [entry for entry in self._slots if entry is not None and entry.owner is None]

    def _occupy(self, slot: int, sequence: KVSequence, computed: int) -> None:
        entry = Entry(slot, sequence)
        self._slots[slot] = entry
        sequence.entry = entry
        sequence.slot = slot
        sequence.num_computed = computed
        self._index.extend(entry, sequence)

    def _bring(self, source: Entry, slot: int, cached: int) -> None:
        """Make `slot` hold the first `cached` tokens of `source`."""
        if source.slot == slot:
            worth_saving = source.length - cached >= SAVE_TAIL_TOKENS
            if not (worth_saving and self._save(source)):
                self._index.remove(source)
            self._slots[slot] = None
        elif source.slot is not None:
            self._vacate(slot)
            self._copy(source.slot, slot, source.length)
        else:
            assert source.saved is not None
            self._store.remove(source)
            self._store.add(source, source.hits)
            saved = source.saved
            # Saving what is in the slot may evict the source; its bytes are in hand.
            self._vacate(slot)
            self._ops.load(slot, saved)
            self._moved_bytes += saved.nbytes
        if self._ops.length(slot) > cached:
            self._ops.remove(slot, cached)

    def _vacate(self, slot: int) -> None:
        """Empty a slot that nobody runs in; what it held moves to the store if there is room."""
        entry = self._slots[slot]
        if entry is not None:
            if not self._save(entry):
                self._index.remove(entry)
            self._empty(slot)

    def _empty(self, slot: int) -> None:
        self._ops.remove(slot, 0)
        self._slots[slot] = None

    def _copy(self, source: int, target: int, tokens: int) -> None:
        self._ops.copy(source, target)
        self._moved_bytes += tokens * self._bytes_per_token

    # -- inside: store -----------------------------------------------------------------------------------------

    def _save(self, entry: Entry) -> bool:
        """Keep a held sequence's content as bytes; its slot is the caller's to empty. False: there is no room."""
        assert entry.slot is not None
        needed = entry.length * (self._bytes_per_token + SAVED_TOKEN_OVERHEAD_BYTES) + SAVED_OVERHEAD_BYTES
        if needed > self._store_bytes:
            return False
        self._make_room(needed, self._store_bytes)
        entry.saved = self._ops.save(entry.slot)
        entry.slot = None
        self._store.add(entry, entry.hits)
        self._stored_tokens += entry.length
        self._stored_bytes += entry.saved.nbytes
        self._moved_bytes += entry.saved.nbytes
        return True

    def _make_room(self, needed: int, limit: int) -> None:
        """Evict saved sequences until `needed` more bytes keep the store within `limit`."""
        if self._stored_bytes + needed <= limit:
            return
        started = self._clock()
        before = self._stored_tokens
        while self._stored_bytes + needed > limit and len(self._store):
            self._evict(self._store.peek())
        if self.on_eviction is not None:
            self.on_eviction(before - self._stored_tokens, self._clock() - started)

    def _evict(self, entry: Entry) -> None:
        self._evictions += entry.length
        self._discard(entry)

    def _discard(self, entry: Entry) -> None:
        """Let go of an entry wherever it is."""
        if entry.slot is not None:
            self._empty(entry.slot)
            entry.slot = None
        if entry.saved is not None:
            self._store.remove(entry)
            self._stored_tokens -= entry.length
            self._stored_bytes -= entry.saved.nbytes
            entry.saved = None
        self._index.remove(entry)


def _preference(entry: Entry) -> tuple[int, int]:
    """Among equals: one that waits in a slot, then a running one, then a saved one; of those the newest."""
    place = 2 if entry.slot is None else int(entry.owner is not None)
    return place, -entry.number


def _describe(entry: Entry | None) -> dict[str, Any]:
    if entry is None:
        return {"state": "free", "tokens": 0}
    if entry.owner is not None:
        return {"state": "running", "tokens": entry.owner.num_computed}
    return {"state": "held", "tokens": entry.length}
