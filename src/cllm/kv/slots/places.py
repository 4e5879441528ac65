"""Where the slots manager's sequences are: the current slots, the store, pins, and the index of all of them.

The cache may always be dropped: what the backend cannot save is lost, what it cannot copy or load is recomputed. Only a
slot that cannot be emptied leaves the whole memory in doubt.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from cllm.errors import BackendError
from cllm.kv.events import KVEvents
from cllm.kv.ops import SavedKV, SlotGeometry, SlotOps
from cllm.kv.pins import Pins
from cllm.kv.sizing import most_bytes
from cllm.kv.slots.events import BlockNameCounts
from cllm.kv.slots.index import CacheEntry, PrefixIndex
from cllm.kv.slots.snapshots import Kept, Snapshots
from cllm.kv.slots.store import SequenceStore

log = logging.getLogger("cllm.kv")


class SlotPlaces:
    def __init__(
        self,
        ops: SlotOps,
        geometry: SlotGeometry,
        *,
        bytes_per_token: int,
        state_bytes: int,
        store_bytes: int,
        block_tokens: int,
        eviction_policy: str,
        pin_limit: float,
        clock: Callable[[], float],
    ) -> None:
        self.geometry = geometry
        self.ops = ops
        self.bytes_per_token = bytes_per_token
        self.state_bytes = state_bytes
        self.slot_bytes = geometry.slot_tokens * bytes_per_token + state_bytes
        self.store_bytes = store_bytes
        self.block_tokens = block_tokens
        self.moved_bytes = 0
        self.coming_bytes = 0
        """Size of sequences being loaded from disk into the store."""
        self.pins: Pins[CacheEntry] = Pins(int(store_bytes * pin_limit), clock, self._drop_pin, _held_by)
        self.events = KVEvents()
        self.slots: list[CacheEntry | None] = [None] * geometry.first
        self._policy_name = eviction_policy
        self._start_empty()

    def _start_empty(self) -> None:
        self.index = PrefixIndex(BlockNameCounts(self.events, self.block_tokens))
        self.store = SequenceStore(self.store_bytes, self._policy_name)
        self.snapshots = Snapshots(self.store_bytes, self.state_bytes)
        self.pins.forget()
        self.pinned_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """The part of the store's memory reserved for loads and pins."""
        return self.coming_bytes + self.pinned_bytes

    @property
    def evictable_bytes(self) -> int:
        """The part of it that may go for something newer."""
        return self.store.bytes + self.snapshots.bytes

    def running_slots(self) -> list[int]:
        return [number for number, entry in enumerate(self.slots) if entry is not None and entry.owner is not None]

    def held_in_slots(self) -> list[CacheEntry]:
        return [entry for entry in self.slots if entry is not None and entry.owner is None]

    def adjacent_slots(self) -> list[int]:
        """Where a new sequence may go: into gaps between running ones, or else next to them."""
        running = self.running_slots()
        if not running:
            return list(range(len(self.slots)))
        low, high = running[0], running[-1]
        if gaps := sorted(set(range(low, high)).difference(running)):
            return gaps
        return [slot for slot in (high + 1, low - 1) if 0 <= slot < len(self.slots)]

    # -- what is cached ------------------------------------------------------------------------------------------

    def find(self, key: bytes, space: bytes) -> tuple[int, CacheEntry | None]:
        """From how many tokens of `key` a sequence can go on, and which entry has them."""
        if self.ops.carries_state:
            return self._find_state(key, space)
        cached, holders = self.index.find(key, space)
        usable = [holder for holder in holders if self._shortest(holder) <= cached] if cached else []
        source = min(usable, key=CacheEntry.preference, default=None)
        return (0, None) if source is None else (cached, source)

    def _find_state(self, key: bytes, space: bytes) -> tuple[int, CacheEntry | None]:
        best: tuple[int, CacheEntry | None] = (0, None)
        for matched, entry in self.index.matches(key, space):
            if matched < best[0]:
                break
            tokens = self.resumable(entry, matched)
            if tokens > best[0] or (
                tokens and tokens == best[0] and best[1] and entry.preference() < best[1].preference()
            ):
                best = tokens, entry
        return best

    def resumable(self, entry: CacheEntry, most_tokens: int) -> int:
        """From where, behind at most so many of its tokens, a sequence can go on that carries a state."""
        if 0 < entry.goes_on_from <= most_tokens:
            return entry.goes_on_from
        snapshot = self.snapshots.deepest(entry.snapshots, most_tokens)
        return 0 if snapshot is None else snapshot.tokens

    def _shortest(self, source: CacheEntry) -> int:
        """The shortest prefix of it that can be used."""
        if source.slot is None:
            assert source.saved is not None
            return self.ops.shortest_saved(source.saved)
        stays = source.owner is None and source.slot in self.adjacent_slots()
        return self.ops.shortest(source.slot, moved=not stays)

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
                    self.forget(entry)
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
        snapshots: list[Kept] = []
        for entry, tokens in self.index.examine():
            yield tokens
            if entry is None:
                continue
            snapshots.append(entry.snapshots)
            if entry.pinned:
                pinned.append(entry)
            elif entry.saved is not None:
                saved.append(entry)
            elif entry.slot is None or self.slots[entry.slot] is not entry:
                raise AssertionError("the index names a sequence that is nowhere")
        self.store.check(saved)
        snapshots += [entry.snapshots for entry in self.slots if entry is not None and entry.node is None]
        self.snapshots.check(snapshots)
        if {id(entry) for entry in pinned} != {id(pin.holder) for pin in self.pins.by_id.values()}:
            raise AssertionError("what is pinned is not what pins hold")
        if sum(0 if entry.saved is None else entry.saved.nbytes for entry in pinned) != self.pinned_bytes:
            raise AssertionError("the bytes of pins are counted wrong")
        if self.evictable_bytes + self.reserved_bytes > self.store_bytes:
            raise AssertionError("the store and what is pinned beside it are more than the store may be")

    # -- the backend ---------------------------------------------------------------------------------------------

    def trim(self, slot: int, tokens: int, state: SavedKV | None = None) -> None:
        """Cut a slot back to its first `tokens`. `state`: the snapshot taken there, if it carries one."""
        held = self.ops.length(slot)
        if held < tokens:
            raise BackendError(f"slot {slot} holds {held} positions, not {tokens}")
        if held == tokens:
            return
        if state is None:
            self.ops.remove(slot, tokens)
        else:
            self.ops.restore(slot, state, tokens)

    def empty(self, slot: int) -> None:
        try:
            self.ops.remove(slot, 0)
        except BackendError as error:
            raise BackendError(f"cannot empty slot {slot}: {error}", fatal=True) from error
        self.slots[slot] = None

    def copy(self, source: int, target: int, tokens: int) -> None:
        self.ops.copy(source, target)
        self.moved_bytes += tokens * self.bytes_per_token

    def copied(self, source: int, target: int, tokens: int) -> bool:
        """Copy into an empty slot. False: the backend failed, and the slot is still empty."""
        try:
            self.copy(source, target, tokens)
        except (BackendError, MemoryError) as error:
            raise_if_fatal(error)
            log.warning("cannot copy slot %d to slot %d: %s", source, target, error)
            self.empty(target)
            return False
        return True

    def read(self, entry: CacheEntry) -> SavedKV | None:
        """The content of an entry's slot as bytes. None: the backend failed to save it."""
        assert entry.slot is not None
        try:
            saved = self.ops.save(entry.slot)
        except (BackendError, MemoryError) as error:
            raise_if_fatal(error)
            log.warning("cannot save %d tokens of slot %d: %s", self.tokens_in(entry), entry.slot, error)
            return None
        self.moved_bytes += saved.nbytes
        return saved

    def tokens_in(self, entry: CacheEntry) -> int:
        return entry.length if entry.owner is None else entry.owner.end

    def saved_bytes(self, entry: CacheEntry) -> int:
        return most_bytes(self.tokens_in(entry), self.bytes_per_token, self.state_bytes)

    # -- entries -------------------------------------------------------------------------------------------------

    def forget(self, entry: CacheEntry) -> None:
        """Nothing of it can be found any more."""
        self.index.remove(entry)
        self.snapshots.clear(entry.snapshots)

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
        self.forget(entry)

    def discard_covered(self, entry: CacheEntry, shortest: int = 0) -> None:
        """Drop ended sequences of at least `shortest` tokens that are a prefix of this one, or equal to it."""
        for other in {other for node in entry.path() for other in node.value if other.node is node} - {entry}:
            if other.owner is None and not other.pinned and other.length >= shortest:
                self.snapshots.share(other.snapshots, entry.snapshots, entry.length)
                if (
                    not self.ops.carries_state
                    or self.resumable(entry, other.length) + self.snapshots.apart > other.length
                ):
                    self.discard(other)
        self.snapshots.thin(entry.snapshots, ())

    def _drop_pin(self, entry: CacheEntry) -> None:
        assert entry.saved is not None
        self.pinned_bytes -= entry.saved.nbytes
        entry.saved, entry.pinned = None, False
        self.snapshots.unpin(entry.snapshots)
        self.forget(entry)


def _held_by(entries: Sequence[CacheEntry]) -> int:
    return sum(entry.saved.nbytes for entry in entries if entry.saved is not None)


def raise_if_fatal(error: BackendError | MemoryError) -> None:
    if isinstance(error, BackendError) and error.fatal:
        raise error
