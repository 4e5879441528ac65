"""The slots manager, for a backend that keeps whole sequences by number (llama.cpp, split streams).

Two places hold computed sequences:

    slots   0    1    2    3  …        where a sequence must be to run; a finished one stays until its slot is wanted
          [run][run][held][free]
    store  ▒▒▒▒▒ ▒▒ ▒▒▒▒▒▒▒            sequences saved as bytes, each as large as its tokens, in order of eviction

A new sequence takes its longest cached prefix from wherever it is: it goes on in the slot that holds it, or the prefix
is copied from another slot (even a running one) or loaded from the store, and trimmed. Running slots are kept adjacent,
because the backend computes only adjacent slots together.

The cache is a help, not a need: what the backend cannot save is dropped, what it cannot copy or load is computed. Only
a slot that cannot be emptied puts the whole context in doubt.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from cllm.errors import BackendError
from cllm.kv.holders import Entry, HolderIndex, describe
from cllm.kv.manager import KVManager, PositionMismatchError
from cllm.kv.ops import SlotGeometry, SlotOps
from cllm.kv.radix import TOKEN_BYTES
from cllm.kv.sequence import KVSequence
from cllm.kv.store import Store, most_bytes
from cllm.kv.usage import KVUsage

log = logging.getLogger("cllm.kv")

SAVE_TAIL_TOKENS = 16
"""A held sequence whose slot is taken over is saved first if at least this many of its tokens would be lost."""


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
        self._evictions = self._queried = self._hit = self._moves = self._moved_bytes = 0
        self._peak = 0
        self._policy_name = eviction_policy
        self._slots: list[Entry | None] = [None] * geometry.slots
        self._start_empty()

    def _start_empty(self) -> None:
        self._index = HolderIndex()
        self._store = Store(self._store_bytes, self._policy_name)

    # -- admission ---------------------------------------------------------------------------------------------

    def peek(self, key: bytes) -> int:
        return self._index.find(key[:-TOKEN_BYTES])[0]

    def admit(self, sequence: KVSequence) -> int | None:
        cached, holders = self._index.find(sequence.tokens.tobytes()[:-TOKEN_BYTES])
        source = min(holders, key=Entry.preference) if cached else None
        slot = self._choose_slot(source)
        if slot is None:
            return None
        if source is None:
            self._vacate(slot)
        elif not self._bring(source, slot, cached):
            cached = 0
        self._occupy(slot, sequence, cached)
        if sequence.counts_as_query:
            self._queried += len(sequence.tokens)
            self._hit += cached
        return cached

    def fork(self, parent: KVSequence, child: KVSequence) -> bool:
        slot = self._choose_slot(None)
        if slot is None:
            return False
        self._vacate(slot)
        if not self._copied(parent.slot, slot, parent.num_computed):
            return False
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
            if not self._copied(entry.slot, gap, entry.owner.num_computed):
                return
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
            sequence.forget_memory()
            entry.owner = None
            for other in self._index.covered_by(entry):
                if other.owner is None:
                    self._discard(other)
        else:
            sequence.forget_memory()
            self._discard(entry)

    # -- upkeep ------------------------------------------------------------------------------------------------

    def maintain(self, budget_s: float) -> bool:
        self._make_room(0, self._threshold_bytes)
        if self._max_sequences is not None:
            occupied = sum(entry is not None for entry in self._slots)
            while len(self._store) and len(self._store) + occupied > self._max_sequences:
                self._evict(self._store.oldest())
        return False

    def reset(self) -> None:
        """What is saved is our own memory and survives, if our account of it is sound; what was in slots is gone."""
        gone = [entry for entry in self._slots if entry is not None]
        self._slots = [None] * self._geometry.slots
        for entry in gone:
            if entry.owner is not None:
                entry.owner.forget_memory()
        try:
            for entry in gone:
                if entry.saved is None:
                    self._index.remove(entry)
            deque(self._examine_store(), maxlen=0)
        except Exception:
            log.exception("the account of the saved sequences is wrong; they are dropped")
            self._start_empty()

    def usage(self) -> KVUsage:
        running = [entry.owner for entry in self._slots if entry is not None and entry.owner is not None]
        held = self._held_in_slots()
        referenced = sum(owner.num_computed for owner in running)
        evictable = sum(entry.length for entry in held) + self._store.tokens
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
            allocation_failures=self.allocation_failures,
            compactions=self._moves,
            moved_bytes=self._moved_bytes,
            query_tokens=self._queried,
            hit_tokens=self._hit,
        )

    def details(self) -> dict[str, Any]:
        return {
            "slots": [describe(entry) for entry in self._slots],
            "slot_tokens": self._geometry.slot_tokens,
            "store": {
                "sequences": len(self._store),
                "tokens": self._store.tokens,
                "bytes": self._store.bytes,
                "capacity_bytes": self._store_bytes,
            },
        }

    def examine(self) -> Iterator[int]:
        yield from self._examine_store()
        for number, entry in enumerate(self._slots):
            expected = 0
            if entry is not None:
                expected = entry.length if entry.owner is None else entry.owner.num_computed
                if entry.slot != number or entry.saved is not None:
                    raise AssertionError(f"slot {number} names a sequence that is elsewhere")
            if self._ops.length(number) != expected:
                raise AssertionError(f"slot {number} holds {self._ops.length(number)} positions, not {expected}")
            yield expected

    def _examine_store(self) -> Iterator[int]:
        """The index, and what it says of the store and the slots."""
        saved: list[Entry] = []
        for entry, tokens in self._index.examine():
            yield tokens
            if entry is None:
                continue
            if entry.saved is not None:
                saved.append(entry)
            elif entry.slot is None or self._slots[entry.slot] is not entry:
                raise AssertionError("the index names a sequence that is nowhere")
        self._store.check(saved)

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

    def _bring(self, source: Entry, slot: int, cached: int) -> bool:
        """Make `slot` hold the first `cached` tokens of `source`. False: the backend cannot, and the slot is empty."""
        source.hits += 1
        saved = source.saved
        try:
            if source.slot == slot:
                self._take_over(source, slot, cached)
            elif source.slot is not None:
                self._vacate(slot)
                self._copy(source.slot, slot, source.length)
            else:
                self._load(source, slot)
            self._trim(slot, cached)
        except (BackendError, MemoryError) as error:
            _raise_if_fatal(error)
            log.warning("%d cached tokens cannot be brought into slot %d: %s; they are computed", cached, slot, error)
            if saved is not None:
                self._discard(source)
            self._empty(slot)
            return False
        return True

    def _take_over(self, source: Entry, slot: int, cached: int) -> None:
        """Go on in the slot of a held sequence, of which only the first `cached` tokens stay there."""
        worth_saving = source.length - cached >= SAVE_TAIL_TOKENS
        if not (worth_saving and self._save(source)):
            self._index.remove(source)
        self._slots[slot] = None

    def _load(self, source: Entry, slot: int) -> None:
        saved = source.saved
        assert saved is not None
        self._store.touch(source)
        # Saving what is in the slot may evict the source; its bytes are in hand.
        self._vacate(slot)
        self._ops.load(slot, saved)
        self._moved_bytes += saved.nbytes

    def _trim(self, slot: int, tokens: int) -> None:
        held = self._ops.length(slot)
        if held < tokens:
            raise BackendError(f"slot {slot} holds {held} positions, not {tokens}")
        if held > tokens:
            self._ops.remove(slot, tokens)

    def _vacate(self, slot: int) -> None:
        """Empty a slot that nobody runs in; what it held moves to the store if there is room."""
        entry = self._slots[slot]
        if entry is not None:
            if not self._save(entry):
                self._index.remove(entry)
            self._empty(slot)

    def _empty(self, slot: int) -> None:
        try:
            self._ops.remove(slot, 0)
        except BackendError as error:
            raise BackendError(f"slot {slot} cannot be emptied: {error}", fatal=True) from error
        self._slots[slot] = None

    def _copy(self, source: int, target: int, tokens: int) -> None:
        self._ops.copy(source, target)
        self._moved_bytes += tokens * self._bytes_per_token

    def _copied(self, source: int, target: int, tokens: int) -> bool:
        """Copy into a slot that is empty. False: the backend cannot, and it is empty still."""
        try:
            self._copy(source, target, tokens)
        except (BackendError, MemoryError) as error:
            _raise_if_fatal(error)
            log.warning("slot %d cannot be copied to slot %d: %s", source, target, error)
            self._empty(target)
            return False
        return True

    # -- inside: store -----------------------------------------------------------------------------------------

    def _save(self, entry: Entry) -> bool:
        """Keep a held sequence's content as bytes; its slot is the caller's to empty. False: there is no room."""
        assert entry.slot is not None
        needed = most_bytes(entry.length, self._bytes_per_token)
        if needed > self._store_bytes:
            return False
        self._make_room(needed, self._store_bytes)
        try:
            saved = self._ops.save(entry.slot)
        except (BackendError, MemoryError) as error:
            _raise_if_fatal(error)
            log.warning("%d cached tokens of slot %d cannot be saved: %s", entry.length, entry.slot, error)
            return False
        self._store.add(entry, saved)
        self._moved_bytes += saved.nbytes
        return True

    def _make_room(self, needed: int, limit: int) -> None:
        """Evict saved sequences until `needed` more bytes keep the store within `limit`."""
        store = self._store
        if store.bytes + needed <= limit:
            return
        started = self._clock()
        before = store.tokens
        while store.bytes + needed > limit and len(store):
            self._evict(store.oldest())
        self._tell_eviction(before - store.tokens, self._clock() - started)

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
        self._index.remove(entry)


def _raise_if_fatal(error: BackendError | MemoryError) -> None:
    if isinstance(error, BackendError) and error.fatal:
        raise error
