"""Where the slots manager's sequences are, and moving them between slots and the store.

The cache may always be dropped: what the backend cannot save is lost, what it cannot copy or load is recomputed. Only a
slot that cannot be emptied leaves the whole memory in doubt.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from cllm.errors import BackendError
from cllm.kv.events import KVEvents
from cllm.kv.manager import EvictionListener
from cllm.kv.memory import most_bytes
from cllm.kv.ops import SavedKV, SlotGeometry, SlotOps
from cllm.kv.pins import Pins
from cllm.kv.slots.events import BlockNameCounts
from cllm.kv.slots.index import CacheEntry, PrefixIndex
from cllm.kv.slots.store import SequenceStore

log = logging.getLogger("cllm.kv")

SAVE_TAIL_TOKENS = 16
"""A held sequence whose slot is reused is saved first if at least this many of its tokens would be lost."""


class SlotPlaces:
    """The current slots, the store, and the index of what is in them."""

    def __init__(
        self,
        ops: SlotOps,
        geometry: SlotGeometry,
        *,
        bytes_per_token: int,
        store_bytes: int,
        block_tokens: int,
        eviction_policy: str,
        pin_limit: float,
        told: EvictionListener,
        clock: Callable[[], float],
    ) -> None:
        self.geometry = geometry
        self.ops = ops
        self.bytes_per_token = bytes_per_token
        self.slot_bytes = geometry.slot_tokens * bytes_per_token
        self.store_bytes = store_bytes
        self.evictions = self.moved_bytes = 0
        self.coming_bytes = 0
        """Size of sequences being loaded from disk into the store."""
        self.in_hand: SavedKV | None = None
        """Bytes being loaded into a slot; they may be evicted from the store meanwhile."""
        self.pins: Pins[CacheEntry] = Pins(int(store_bytes * pin_limit), clock, self._drop_pin, _held_by)
        self.events = KVEvents()
        self.slots: list[CacheEntry | None] = [None] * geometry.first
        self.before_eviction: Callable[[CacheEntry], None] = lambda entry: None
        """Called with a saved sequence that is about to go."""
        self._policy_name = eviction_policy
        self._block_tokens = block_tokens
        self._told = told
        self._clock = clock
        self._start_empty()

    def _start_empty(self) -> None:
        self.index = PrefixIndex(BlockNameCounts(self.events, self._block_tokens))
        self.store = SequenceStore(self.store_bytes, self._policy_name)
        self.pins.forget()
        self.pinned_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """The part of the store's memory reserved for loads and pins."""
        return self.coming_bytes + self.pinned_bytes

    def running_slots(self) -> list[int]:
        return [number for number, entry in enumerate(self.slots) if entry is not None and entry.owner is not None]

    def held_in_slots(self) -> list[CacheEntry]:
        return [entry for entry in self.slots if entry is not None and entry.owner is None]

    def reset(self) -> None:
        """Saved sequences are in our own memory and survive, if the bookkeeping is sound; slots' contents are gone."""
        gone = [entry for entry in self.slots if entry is not None]
        self.slots = [None] * self.geometry.first
        for entry in gone:
            if entry.owner is not None:
                entry.owner.forget_memory()
        try:
            for entry in gone:
                if entry.saved is None:
                    self.index.remove(entry)
            deque(self._examine_store(), maxlen=0)
        except Exception:
            log.exception("the list of saved sequences is inconsistent; dropping them")
            self._start_empty()

    def examine(self) -> Iterator[int]:
        yield from self._examine_store()
        for number, entry in enumerate(self.slots):
            expected = 0
            if entry is not None:
                expected = self.tokens_in(entry)
                if entry.slot != number or entry.saved is not None:
                    raise AssertionError(f"slot {number} names a sequence that is elsewhere")
            if self.ops.length(number) != expected:
                raise AssertionError(f"slot {number} holds {self.ops.length(number)} positions, not {expected}")
            yield expected

    def _examine_store(self) -> Iterator[int]:
        """Check the index against the store and the slots."""
        saved: list[CacheEntry] = []
        pinned: list[CacheEntry] = []
        for entry, tokens in self.index.examine():
            yield tokens
            if entry is None:
                continue
            if entry.pinned:
                pinned.append(entry)
            elif entry.saved is not None:
                saved.append(entry)
            elif entry.slot is None or self.slots[entry.slot] is not entry:
                raise AssertionError("the index names a sequence that is nowhere")
        self.store.check(saved)
        if {id(entry) for entry in pinned} != {id(pin.holder) for pin in self.pins.by_id.values()}:
            raise AssertionError("what is pinned is not what pins hold")
        if sum(0 if entry.saved is None else entry.saved.nbytes for entry in pinned) != self.pinned_bytes:
            raise AssertionError("the bytes of pins are counted wrong")
        if self.store.bytes + self.reserved_bytes > self.store_bytes:
            raise AssertionError("the store and what is pinned beside it are more than the store may be")

    # -- slots -------------------------------------------------------------------------------------------------

    def bring(self, source: CacheEntry, slot: int, cached: int, space: bytes) -> bool:
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
                self.vacate(slot)
                self._copy(source.slot, slot, source.length)
            else:
                self._load(source, slot)
            self.trim(slot, cached)
        except (BackendError, MemoryError) as error:
            _raise_if_fatal(error)
            log.warning("cannot load %d cached tokens into slot %d: %s; recomputing them", cached, slot, error)
            if saved is not None:
                self.discard(source)
            self.empty(slot)
            return False
        return True

    def _take_over(self, source: CacheEntry, slot: int, needed: bool) -> None:
        """Continue in the slot of a held sequence, saving it first if others may need it."""
        if not (needed and self.save(source)):
            self.index.remove(source)
        self.slots[slot] = None

    def _load(self, source: CacheEntry, slot: int) -> None:
        saved = source.saved
        assert saved is not None
        if not source.pinned:
            self.store.touch(source)
        # Saving the slot's content may evict the source from the store.
        self.in_hand = saved
        try:
            self.vacate(slot)
            self.ops.load(slot, saved)
        finally:
            self.in_hand = None
        self.moved_bytes += saved.nbytes

    def trim(self, slot: int, tokens: int) -> None:
        held = self.ops.length(slot)
        if held < tokens:
            raise BackendError(f"slot {slot} holds {held} positions, not {tokens}")
        if held > tokens:
            self.ops.remove(slot, tokens)

    def vacate(self, slot: int) -> None:
        """Empty a slot that is not running; its content moves to the store if there is room."""
        entry = self.slots[slot]
        if entry is not None:
            if not self.save(entry):
                self.index.remove(entry)
            self.empty(slot)

    def empty(self, slot: int) -> None:
        try:
            self.ops.remove(slot, 0)
        except BackendError as error:
            raise BackendError(f"cannot empty slot {slot}: {error}", fatal=True) from error
        self.slots[slot] = None

    def _copy(self, source: int, target: int, tokens: int) -> None:
        self.ops.copy(source, target)
        self.moved_bytes += tokens * self.bytes_per_token

    def copied(self, source: int, target: int, tokens: int) -> bool:
        """Copy into an empty slot. False: the backend failed, and the slot is still empty."""
        try:
            self._copy(source, target, tokens)
        except (BackendError, MemoryError) as error:
            _raise_if_fatal(error)
            log.warning("cannot copy slot %d to slot %d: %s", source, target, error)
            self.empty(target)
            return False
        return True

    # -- store -------------------------------------------------------------------------------------------------

    def save(self, entry: CacheEntry) -> bool:
        """Save a held sequence to the store; the caller empties its slot. False: there is no room."""
        assert entry.slot is not None
        needed = most_bytes(entry.length, self.bytes_per_token)
        if needed + self.reserved_bytes > self.store_bytes:
            return False
        self.make_room(needed, self.store_bytes)
        saved = self.read(entry)
        if saved is None:
            return False
        self.store.add(entry, saved)
        return True

    def read(self, entry: CacheEntry) -> SavedKV | None:
        """The content of an entry's slot as bytes. None: the backend failed to save it."""
        assert entry.slot is not None
        try:
            saved = self.ops.save(entry.slot)
        except (BackendError, MemoryError) as error:
            _raise_if_fatal(error)
            log.warning("cannot save %d tokens of slot %d: %s", self.tokens_in(entry), entry.slot, error)
            return None
        self.moved_bytes += saved.nbytes
        return saved

    def make_room(self, needed: int, limit: int) -> None:
        """Evict saved sequences until `needed` more bytes keep the store within `limit`."""
        store = self.store
        needed += self.reserved_bytes
        if store.bytes + needed <= limit:
            return
        started = self._clock()
        before = store.tokens
        while store.bytes + needed > limit and len(store):
            self.evict(store.oldest())
        self._told(before - store.tokens, self._clock() - started)

    def evict(self, entry: CacheEntry) -> None:
        self.before_eviction(entry)
        self.evictions += entry.length
        self.discard(entry)

    def discard(self, entry: CacheEntry) -> None:
        """Drop an entry, wherever it is."""
        if entry.slot is not None:
            self.empty(entry.slot)
            entry.slot = None
        if entry.pinned:
            name = next(pin.id for pin in self.pins.by_id.values() if pin.holder is entry)
            self.pins.remove(name)
            return
        if entry.saved is not None:
            self.store.remove(entry)
        self.index.remove(entry)

    def _drop_pin(self, entry: CacheEntry) -> None:
        assert entry.saved is not None
        self.pinned_bytes -= entry.saved.nbytes
        entry.saved, entry.pinned = None, False
        self.index.remove(entry)

    def tokens_in(self, entry: CacheEntry) -> int:
        return entry.length if entry.owner is None else entry.owner.end

    def saved_bytes(self, entry: CacheEntry) -> int:
        return most_bytes(self.tokens_in(entry), self.bytes_per_token)


def _held_by(entries: Sequence[CacheEntry]) -> int:
    return sum(entry.saved.nbytes for entry in entries if entry.saved is not None)


def _raise_if_fatal(error: BackendError | MemoryError) -> None:
    if isinstance(error, BackendError) and error.fatal:
        raise error
