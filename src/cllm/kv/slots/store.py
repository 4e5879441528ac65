"""The slots manager's store: finished sequences saved as bytes, in order of eviction."""

from __future__ import annotations

from collections.abc import Iterator

from cllm.kv.eviction import EvictionClock, EvictionPolicy, computing, make_policy
from cllm.kv.ops import SavedKV
from cllm.kv.slots.index import CacheEntry


class SequenceStore:
    """Counts what it holds; its owner keeps it within `capacity` bytes."""

    def __init__(self, capacity: int, policy: str) -> None:
        self.capacity = capacity
        self.bytes = 0
        self.tokens = 0
        self._clock = EvictionClock()
        self._order: EvictionPolicy[CacheEntry] = make_policy(policy, self._clock)

    def add(self, entry: CacheEntry, saved: SavedKV) -> None:
        """Hold `saved` for an entry that has left its slot."""
        entry.saved = saved
        entry.slot = None
        self._queue(entry, saved)
        self._clock.advance(saved.nbytes / max(1, self.capacity))
        self.tokens += entry.length
        self.bytes += saved.nbytes

    def touch(self, entry: CacheEntry) -> None:
        """It was used just now."""
        assert entry.saved is not None
        self._order.remove(entry)
        self._queue(entry, entry.saved)

    def _queue(self, entry: CacheEntry, saved: SavedKV) -> None:
        self._order.add(entry, entry.hits, computing(0, entry.length) / max(1, saved.nbytes))

    def remove(self, entry: CacheEntry) -> None:
        assert entry.saved is not None
        self._order.remove(entry)
        self.tokens -= entry.length
        self.bytes -= entry.saved.nbytes
        entry.saved = None

    def next_to_go(self) -> CacheEntry:
        """The first in the order of eviction."""
        return self._order.peek()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[CacheEntry]:
        """In the order of eviction."""
        return iter(self._order)

    def check(self, entries: list[CacheEntry]) -> None:
        """These, and no others, are what is held."""
        tokens = sum(entry.length for entry in entries)
        size = sum(entry.saved.nbytes for entry in entries if entry.saved is not None)
        if any(entry.slot is not None or entry not in self._order for entry in entries):
            raise AssertionError("a saved sequence is in a slot, or not evictable")
        if (len(entries), tokens, size) != (len(self), self.tokens, self.bytes):
            raise AssertionError(f"{len(entries)} sequences of {size} bytes are stored, {self.bytes} bytes counted")
        if size > self.capacity:
            raise AssertionError(f"{size} bytes are stored, {self.capacity} are allowed")
