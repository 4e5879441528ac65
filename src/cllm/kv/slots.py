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
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from cllm.kv.eviction import EvictionPolicy, make_policy
from cllm.kv.manager import KVManager, PositionMismatchError
from cllm.kv.ops import SavedKV, SlotGeometry, SlotOps
from cllm.kv.radix import TOKEN_BYTES, Node, RadixTree
from cllm.kv.sequence import KVSequence
from cllm.kv.usage import KVUsage

SAVE_TAIL_TOKENS = 16
"""A held sequence whose slot is taken over is saved first if at least this many of its tokens would be lost."""

SAVED_OVERHEAD_BYTES = 32
"""Upper bound of what a saved sequence needs per token beside its K/V (positions and the like)."""


class Entry:
    """One computed sequence: running or held in a slot, or saved in the store."""

    __slots__ = ("hits", "length", "node", "number", "owner", "saved", "slot")
    _numbers = count()

    def __init__(self, slot: int, owner: KVSequence) -> None:
        self.number = next(Entry._numbers)
        self.slot: int | None = slot
        self.owner: KVSequence | None = owner
        self.saved: SavedKV | None = None
        self.node: Node[set[Entry]] | None = None
        self.length = 0
        self.hits = 0


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
        self._saved_token_bytes = bytes_per_token + SAVED_OVERHEAD_BYTES
        self._store_tokens = store_bytes // self._saved_token_bytes
        self._threshold_tokens = int(self._store_tokens * eviction_threshold)
        self._max_sequences = max_sequences
        self._policy_name = eviction_policy
        self._clock = clock
        self._evictions = self._failures = self._queried = self._hit = self._moves = self._moved_bytes = 0
        self._peak = 0
        self._start_empty()

    def _start_empty(self) -> None:
        self._slots: list[Entry | None] = [None] * self._geometry.slots
        self._tree: RadixTree[set[Entry]] = RadixTree(1, set(), _split_holders)
        self._store: EvictionPolicy[Entry] = make_policy(self._policy_name)
        self._stored_tokens = 0

    # -- admission ---------------------------------------------------------------------------------------------

    def peek(self, key: bytes) -> int:
        return self._tree.find(key[:-TOKEN_BYTES]).matched // TOKEN_BYTES

    def admit(self, sequence: KVSequence) -> int | None:
        key = sequence.tokens.tobytes()
        found = self._tree.find(key[:-TOKEN_BYTES])
        cached = found.matched // TOKEN_BYTES
        source = _best_holder(found.node.value) if cached else None
        slot = self._choose_slot(source)
        if slot is None:
            self._failures += 1
            return None
        if source is not None:
            source.hits += 1
            self._bring(source, slot, cached)
        else:
            self._vacate(slot)
        entry = Entry(slot, sequence)
        entry.hits = source.hits if source is not None else 0
        self._slots[slot] = entry
        sequence.entry = entry
        sequence.slot = slot
        sequence.num_computed = cached
        self._index(sequence)
        self._queried += len(sequence.tokens)
        self._hit += cached
        return cached

    def arrange(self) -> None:
        """Move running sequences from the end into gaps, so that the backend computes them together."""
        running = self._running_slots()
        while running and running[-1] - running[0] + 1 > len(running):
            gap = next(n for n in range(running[0], running[-1]) if n not in running)
            entry = self._slots[running[-1]]
            assert entry is not None and entry.owner is not None and entry.slot is not None
            self._vacate(gap)
            self._copy(entry.slot, gap, entry.owner.num_computed)
            self._ops.remove(entry.slot, 0)
            self._slots[entry.slot] = None
            self._slots[gap] = entry
            entry.slot = entry.owner.slot = gap
            self._moves += 1
            running = self._running_slots()

    def grow(self, sequence: KVSequence, count: int) -> bool:
        return sequence.num_computed + count <= self.max_tokens

    def fork(self, parent: KVSequence, child: KVSequence) -> bool:
        slot = self._choose_slot(None)
        if slot is None:
            self._failures += 1
            return False
        self._vacate(slot)
        self._copy(parent.slot, slot, parent.num_computed)
        entry = Entry(slot, child)
        self._slots[slot] = entry
        child.entry = entry
        child.slot = slot
        child.num_computed = parent.num_computed
        self._index(child)
        return True

    # -- after a step ------------------------------------------------------------------------------------------

    def commit(self, sequence: KVSequence) -> None:
        # A token at a time is indexed when the sequence ends; whole prompt chunks at once, for others to share.
        if sequence.num_computed - sequence.entry.length > 1:
            self._index(sequence)

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
            self._index(sequence)
            entry.owner = None
            self._drop_covered(entry)
        else:
            self._discard(entry)
        sequence.entry = None
        sequence.slot = -1
        sequence.num_computed = 0

    # -- upkeep ------------------------------------------------------------------------------------------------

    def maintain(self, *, idle: bool) -> None:
        self._make_room(0, self._threshold_tokens)
        if self._max_sequences is not None:
            while len(self._store) and len(self._store) + self._occupied() > self._max_sequences:
                self._evict(self._store.peek())

    def clear(self) -> None:
        while len(self._store):
            self._evict(self._store.peek())
        for entry in self._held_in_slots():
            self._evict(entry)

    def reset(self) -> None:
        if any(entry is not None and entry.owner is not None for entry in self._slots):
            raise ValueError("sequences still hold slots")
        # What is saved is our own memory and survives; what was only in slots is gone.
        for entry in self._held_in_slots():
            self._forget(entry)
        self._slots = [None] * self._geometry.slots

    def usage(self) -> KVUsage:
        referenced = held = running = held_count = 0
        longest_gap = gaps = gap = 0
        for entry in self._slots:
            if entry is None:
                gaps += gap == 0
                gap += 1
                longest_gap = max(longest_gap, gap)
                continue
            gap = 0
            if entry.owner is not None:
                running += 1
                referenced += entry.owner.num_computed
            else:
                held_count += 1
                held += entry.length
        total = self._geometry.tokens + self._store_tokens
        evictable = held + self._stored_tokens
        self._peak = max(self._peak, referenced)
        return KVUsage(
            "slots",
            1,
            self._bytes_per_token,
            total,
            total - evictable - referenced,
            evictable,
            referenced,
            self._peak,
            running,
            held_count + len(self._store),
            gaps,
            longest_gap * self._geometry.slot_tokens,
            self._evictions,
            self._failures,
            self._moves,
            self._moved_bytes,
            self._queried,
            self._hit,
        )

    def details(self) -> dict[str, Any]:
        return {
            "slots": [_describe(entry) for entry in self._slots],
            "slot_tokens": self._geometry.slot_tokens,
            "store": {
                "sequences": len(self._store),
                "tokens": self._stored_tokens,
                "capacity_tokens": self._store_tokens,
            },
        }

    def check(self) -> None:
        self._tree.check()
        stored = 0
        entries = [entry for entry in self._slots if entry is not None]
        for number, entry in enumerate(self._slots):
            if entry is None:
                if self._ops.length(number):
                    raise AssertionError(f"slot {number} is free but holds {self._ops.length(number)} positions")
                continue
            expected = entry.length if entry.owner is None else entry.owner.num_computed
            if entry.slot != number or self._ops.length(number) != expected:
                raise AssertionError(f"slot {number} holds {self._ops.length(number)} positions, not {expected}")
        holders = {holder for node in self._tree.nodes() for holder in node.value}
        for holder in holders:
            if holder.saved is None:
                if holder not in entries:
                    raise AssertionError("the index names a sequence that is nowhere")
            else:
                stored += holder.length
                if holder.slot is not None or holder not in self._store:
                    raise AssertionError("a saved sequence is in a slot, or not evictable")
        if stored != self._stored_tokens or stored > self._store_tokens:
            raise AssertionError(f"{stored} tokens are stored, {self._stored_tokens} counted")
        self._check_index(holders)

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
        return [n for n, entry in enumerate(self._slots) if entry is not None and entry.owner is not None]

    def _held_in_slots(self) -> list[Entry]:
        return [entry for entry in self._slots if entry is not None and entry.owner is None]

    def _occupied(self) -> int:
        return sum(entry is not None for entry in self._slots)

    def _bring(self, source: Entry, slot: int, cached: int) -> None:
        """Make `slot` hold the first `cached` tokens of `source`."""
        if source.slot == slot:
            worth_saving = source.length - cached >= SAVE_TAIL_TOKENS
            if not (worth_saving and self._save(source)):
                self._forget(source)
            self._slots[slot] = None
        else:
            # The source itself may be evicted to make room for what is saved from this slot; it is used first.
            if source.saved is not None:
                self._touch(source)
            self._vacate(slot, spare=source)
            if source.slot is not None:
                self._copy(source.slot, slot, source.length)
            elif source.saved is not None:
                self._ops.load(slot, source.saved)
                self._moved_bytes += source.saved.nbytes
        if self._ops.length(slot) > cached:
            self._ops.remove(slot, cached)

    def _vacate(self, slot: int, spare: Entry | None = None) -> None:
        """Empty a slot that nobody runs in; what it held moves to the store if there is room."""
        entry = self._slots[slot]
        if entry is None:
            return
        if not self._save(entry, spare):
            self._forget(entry)
        self._slots[slot] = None
        self._ops.remove(slot, 0)

    def _copy(self, source: int, target: int, tokens: int) -> None:
        self._ops.copy(source, target)
        self._moved_bytes += tokens * self._bytes_per_token

    # -- inside: store -----------------------------------------------------------------------------------------

    def _save(self, entry: Entry, spare: Entry | None = None) -> bool:
        """Keep a held sequence's content as bytes. Its slot is the caller's to empty. False if there is no room."""
        assert entry.slot is not None
        if entry.length > self._store_tokens:
            return False
        if not self._make_room(entry.length, self._store_tokens, spare):
            return False
        entry.saved = self._ops.save(entry.slot)
        self._moved_bytes += entry.saved.nbytes
        entry.slot = None
        self._store.add(entry, entry.hits)
        self._stored_tokens += entry.length
        return True

    def _touch(self, entry: Entry) -> None:
        self._store.remove(entry)
        self._store.add(entry, entry.hits)

    def _make_room(self, tokens: int, limit: int, spare: Entry | None = None) -> bool:
        started = self._clock()
        evicted = 0
        while self._stored_tokens + tokens > limit and len(self._store):
            oldest = self._store.peek()
            if oldest is spare:
                return False
            evicted += oldest.length
            self._evict(oldest)
        if evicted and self.on_eviction is not None:
            self.on_eviction(evicted, self._clock() - started)
        return self._stored_tokens + tokens <= limit

    def _evict(self, entry: Entry) -> None:
        self._evictions += entry.length
        self._discard(entry)

    def _discard(self, entry: Entry) -> None:
        if entry.slot is not None:
            self._ops.remove(entry.slot, 0)
            self._slots[entry.slot] = None
            entry.slot = None
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        """Take an entry out of store and index."""
        if entry.saved is not None:
            self._store.remove(entry)
            self._stored_tokens -= entry.length
            entry.saved = None
        node, entry.node = entry.node, None
        while node is not None and node.parent is not None:
            node.value.discard(entry)
            node = self._tree.remove(node) if not node.value else node.parent

    # -- inside: index -----------------------------------------------------------------------------------------

    def _index(self, sequence: KVSequence) -> None:
        """Let the index know everything the sequence has computed."""
        entry: Entry = sequence.entry
        start = entry.node or self._tree.root
        key = sequence.tokens[entry.length : sequence.num_computed].tobytes()
        found = self._tree.find(key, start)
        node = self._tree.cut(found) if found.matched else start
        part = node
        while part is not start:
            part.value.add(entry)
            assert part.parent is not None
            part = part.parent
        if rest := key[found.matched :]:
            if node.parent is not None and not node.children and node.value == {entry}:
                node.key += rest
            else:
                node = self._tree.add(node, rest, {entry})
        entry.node = node if node.parent is not None else None
        entry.length = sequence.num_computed

    def _drop_covered(self, entry: Entry) -> None:
        """Held sequences that are a prefix of this one, or equal to it, give nothing that it does not."""
        assert entry.node is not None
        covered = {
            other
            for node in entry.node.path()
            for other in node.value
            if other is not entry and other.node is node and other.owner is None
        }
        for other in covered:
            self._discard(other)

    def _check_index(self, holders: set[Entry]) -> None:
        for holder in holders:
            spelled = b"".join(bytes(node.key) for node in reversed(list(_path(holder))))
            if len(spelled) != holder.length * TOKEN_BYTES:
                raise AssertionError("an entry's path is not as long as the entry")
            if any(holder not in node.value for node in _path(holder)):
                raise AssertionError("an entry is missing from its own path")
            if holder.owner is not None and not holder.owner.tokens.tobytes().startswith(spelled):
                raise AssertionError("an entry stands on a path that spells other tokens")
        for node in self._tree.nodes():
            if not node.value:
                raise AssertionError("a node has no holder")


def _path(entry: Entry) -> Iterator[Node[set[Entry]]]:
    return entry.node.path() if entry.node is not None else iter(())


def _best_holder(holders: set[Entry]) -> Entry | None:
    """Among equals: one that waits in a slot, then a running one, then a saved one; of those the newest."""

    def rank(entry: Entry) -> tuple[int, int]:
        place = 2 if entry.slot is None else int(entry.owner is not None)
        return place, -entry.number

    return min(holders, key=rank, default=None)


def _split_holders(holders: set[Entry], at: int) -> tuple[set[Entry], set[Entry]]:
    return set(holders), holders


def _describe(entry: Entry | None) -> dict[str, Any]:
    if entry is None:
        return {"state": "free", "tokens": 0}
    if entry.owner is not None:
        return {"state": "running", "tokens": entry.owner.num_computed}
    return {"state": "held", "tokens": entry.length}
