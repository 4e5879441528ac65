"""Where the slots manager's sequences are, and moving them between slots and the store.

The cache may always be dropped: what the backend cannot save is lost, what it cannot copy or load is recomputed. Only a
slot that cannot be emptied leaves the whole memory in doubt.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from cllm.errors import BackendError
from cllm.kv.events import KVEvents
from cllm.kv.manager import KVManager
from cllm.kv.memory import most_bytes
from cllm.kv.ops import SavedKV, SlotGeometry, SlotOps
from cllm.kv.pins import Pins
from cllm.kv.slots.events import BlockNameCounts
from cllm.kv.slots.index import CacheEntry, PrefixIndex
from cllm.kv.slots.store import SequenceStore
from cllm.kv.tiers.loads import Load

log = logging.getLogger("cllm.kv")

SAVE_TAIL_TOKENS = 16
"""A held sequence whose slot is reused is saved first if at least this many of its tokens would be lost."""


class SlotMemory(KVManager):
    """The current slots, the store, and the index of what is in them."""

    def __init__(
        self,
        ops: SlotOps,
        geometry: SlotGeometry,
        *,
        bytes_per_token: int,
        store_bytes: int = 0,
        block_tokens: int = 16,
        eviction_policy: str = "lru",
        pin_limit: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_tokens = geometry.slot_tokens
        self._geometry = geometry
        self._ops = ops
        self._bytes_per_token = bytes_per_token
        self._slot_bytes = geometry.slot_tokens * bytes_per_token
        self._store_bytes = store_bytes
        self._clock = clock
        self._evictions = self._moves = self._moved_bytes = 0
        self._resizes = self._resizes_failed = self._released_bytes = 0
        self._coming_bytes = 0
        """Size of sequences being loaded from disk into the store."""
        self._in_hand: SavedKV | None = None
        """Bytes being loaded into a slot; they may be evicted from the store meanwhile."""
        self._loads: list[Load] = []
        self._pins: Pins[CacheEntry] = Pins(int(store_bytes * pin_limit), clock, self._drop_pin, _held_by)
        self._pinned_bytes = 0
        self._policy_name = eviction_policy
        self._events = KVEvents()
        self._block_tokens = block_tokens
        self._slots: list[CacheEntry | None] = [None] * geometry.first
        self._start_empty()

    def _start_empty(self) -> None:
        self._index = PrefixIndex(BlockNameCounts(self._events, self._block_tokens))
        self._store = SequenceStore(self._store_bytes, self._policy_name)
        self._pins.forget()
        self._pinned_bytes = 0

    @property
    def _reserved_bytes(self) -> int:
        """The part of the store's memory reserved for loads and pins."""
        return self._coming_bytes + self._pinned_bytes

    def _running_slots(self) -> list[int]:
        return [number for number, entry in enumerate(self._slots) if entry is not None and entry.owner is not None]

    def _held_in_slots(self) -> list[CacheEntry]:
        return [entry for entry in self._slots if entry is not None and entry.owner is None]

    def reset(self) -> None:
        """Saved sequences are in our own memory and survive, if the bookkeeping is sound; slots' contents are gone."""
        gone = [entry for entry in self._slots if entry is not None]
        self._slots = [None] * self._geometry.first
        for entry in gone:
            if entry.owner is not None:
                entry.owner.forget_memory()
        try:
            for entry in gone:
                if entry.saved is None:
                    self._index.remove(entry)
            deque(self._examine_store(), maxlen=0)
        except Exception:
            log.exception("the list of saved sequences is inconsistent; dropping them")
            self._start_empty()

    def examine(self) -> Iterator[int]:
        yield from self._examine_store()
        for number, entry in enumerate(self._slots):
            expected = 0
            if entry is not None:
                expected = self._tokens_in(entry)
                if entry.slot != number or entry.saved is not None:
                    raise AssertionError(f"slot {number} names a sequence that is elsewhere")
            if self._ops.length(number) != expected:
                raise AssertionError(f"slot {number} holds {self._ops.length(number)} positions, not {expected}")
            yield expected

    def _examine_store(self) -> Iterator[int]:
        """Check the index against the store and the slots."""
        saved: list[CacheEntry] = []
        pinned: list[CacheEntry] = []
        for entry, tokens in self._index.examine():
            yield tokens
            if entry is None:
                continue
            if entry.pinned:
                pinned.append(entry)
            elif entry.saved is not None:
                saved.append(entry)
            elif entry.slot is None or self._slots[entry.slot] is not entry:
                raise AssertionError("the index names a sequence that is nowhere")
        self._store.check(saved)
        if {id(entry) for entry in pinned} != {id(pin.holder) for pin in self._pins.by_id.values()}:
            raise AssertionError("what is pinned is not what pins hold")
        if sum(0 if entry.saved is None else entry.saved.nbytes for entry in pinned) != self._pinned_bytes:
            raise AssertionError("the bytes of pins are counted wrong")
        if self._store.bytes + self._reserved_bytes > self._store_bytes:
            raise AssertionError("the store and what is pinned beside it are more than the store may be")

    # -- slots -------------------------------------------------------------------------------------------------

    def _bring(self, source: CacheEntry, slot: int, cached: int, space: bytes) -> bool:
        """Put the first `cached` tokens of `source` into `slot` for a sequence of `space`. False: the backend failed,
        and the slot is empty."""
        source.hits += 1
        saved = source.saved
        try:
            if source.slot == slot:
                # A sequence of another space does not replace the source, which others still look for.
                needed = source.length - cached >= SAVE_TAIL_TOKENS or source.space != space
                self._take_over(source, slot, needed)
            elif source.slot is not None:
                self._vacate(slot)
                self._copy(source.slot, slot, source.length)
            else:
                self._load(source, slot)
            self._trim(slot, cached)
        except (BackendError, MemoryError) as error:
            _raise_if_fatal(error)
            log.warning("cannot load %d cached tokens into slot %d: %s; recomputing them", cached, slot, error)
            if saved is not None:
                self._discard(source)
            self._empty(slot)
            return False
        return True

    def _take_over(self, source: CacheEntry, slot: int, needed: bool) -> None:
        """Continue in the slot of a held sequence, saving it first if others may need it."""
        if not (needed and self._save(source)):
            self._index.remove(source)
        self._slots[slot] = None

    def _load(self, source: CacheEntry, slot: int) -> None:
        saved = source.saved
        assert saved is not None
        if not source.pinned:
            self._store.touch(source)
        # Saving the slot's content may evict the source from the store.
        self._in_hand = saved
        try:
            self._vacate(slot)
            self._ops.load(slot, saved)
        finally:
            self._in_hand = None
        self._moved_bytes += saved.nbytes

    def _trim(self, slot: int, tokens: int) -> None:
        held = self._ops.length(slot)
        if held < tokens:
            raise BackendError(f"slot {slot} holds {held} positions, not {tokens}")
        if held > tokens:
            self._ops.remove(slot, tokens)

    def _vacate(self, slot: int) -> None:
        """Empty a slot that is not running; its content moves to the store if there is room."""
        entry = self._slots[slot]
        if entry is not None:
            if not self._save(entry):
                self._index.remove(entry)
            self._empty(slot)

    def _empty(self, slot: int) -> None:
        try:
            self._ops.remove(slot, 0)
        except BackendError as error:
            raise BackendError(f"cannot empty slot {slot}: {error}", fatal=True) from error
        self._slots[slot] = None

    def _copy(self, source: int, target: int, tokens: int) -> None:
        self._ops.copy(source, target)
        self._moved_bytes += tokens * self._bytes_per_token

    def _copied(self, source: int, target: int, tokens: int) -> bool:
        """Copy into an empty slot. False: the backend failed, and the slot is still empty."""
        try:
            self._copy(source, target, tokens)
        except (BackendError, MemoryError) as error:
            _raise_if_fatal(error)
            log.warning("cannot copy slot %d to slot %d: %s", source, target, error)
            self._empty(target)
            return False
        return True

    # -- store -------------------------------------------------------------------------------------------------

    def _save(self, entry: CacheEntry) -> bool:
        """Save a held sequence to the store; the caller empties its slot. False: there is no room."""
        assert entry.slot is not None
        needed = most_bytes(entry.length, self._bytes_per_token)
        if needed + self._reserved_bytes > self._store_bytes:
            return False
        self._make_room(needed, self._store_bytes)
        saved = self._read(entry)
        if saved is None:
            return False
        self._store.add(entry, saved)
        return True

    def _read(self, entry: CacheEntry) -> SavedKV | None:
        """The content of an entry's slot as bytes. None: the backend failed to save it."""
        assert entry.slot is not None
        try:
            saved = self._ops.save(entry.slot)
        except (BackendError, MemoryError) as error:
            _raise_if_fatal(error)
            log.warning("cannot save %d tokens of slot %d: %s", self._tokens_in(entry), entry.slot, error)
            return None
        self._moved_bytes += saved.nbytes
        return saved

    def _make_room(self, needed: int, limit: int) -> None:
        """Evict saved sequences until `needed` more bytes keep the store within `limit`."""
        store = self._store
        needed += self._reserved_bytes
        if store.bytes + needed <= limit:
            return
        started = self._clock()
        before = store.tokens
        while store.bytes + needed > limit and len(store):
            self._evict(store.oldest())
        self._tell_eviction(before - store.tokens, self._clock() - started)

    def _evict(self, entry: CacheEntry) -> None:
        self._evictions += entry.length
        self._discard(entry)

    def _discard(self, entry: CacheEntry) -> None:
        """Drop an entry, wherever it is."""
        if entry.slot is not None:
            self._empty(entry.slot)
            entry.slot = None
        if entry.pinned:
            name = next(pin.id for pin in self._pins.by_id.values() if pin.holder is entry)
            self._pins.remove(name)
            return
        if entry.saved is not None:
            self._store.remove(entry)
        self._index.remove(entry)

    def _drop_pin(self, entry: CacheEntry) -> None:
        assert entry.saved is not None
        self._pinned_bytes -= entry.saved.nbytes
        entry.saved, entry.pinned = None, False
        self._index.remove(entry)

    def _tokens_in(self, entry: CacheEntry) -> int:
        return entry.length if entry.owner is None else entry.owner.end

    def _most_bytes(self, entry: CacheEntry) -> int:
        return most_bytes(self._tokens_in(entry), self._bytes_per_token)


def _held_by(entries: Sequence[CacheEntry]) -> int:
    return sum(entry.saved.nbytes for entry in entries if entry.saved is not None)


def _raise_if_fatal(error: BackendError | MemoryError) -> None:
    if isinstance(error, BackendError) and error.fatal:
        raise error
