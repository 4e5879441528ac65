"""The slots manager's store: finished sequences saved as bytes, in order of eviction."""

from __future__ import annotations

from cllm.kv.eviction import EvictionPolicy, make_policy
from cllm.kv.ops import SavedKV
from cllm.kv.slots.index import CacheEntry


class SequenceStore:
    """Counts what it holds; its owner keeps it within `capacity` bytes."""

    def __init__(self, capacity: int, policy: str) -> None:
        self.capacity = capacity
        self.bytes = 0
        self.tokens = 0
        self.entries: dict[CacheEntry, None] = {}
        self._order: EvictionPolicy[CacheEntry] = make_policy(policy)

    def add(self, entry: CacheEntry, saved: SavedKV) -> None:
        """Hold `saved` for an entry that has left its slot."""
        entry.saved = saved
        entry.slot = None
        self.entries[entry] = None
        self._order.add(entry, entry.hits)
        self.tokens += entry.length
        self.bytes += saved.nbytes

    def touch(self, entry: CacheEntry) -> None:
        """It was used just now."""
        self._order.remove(entry)
        self._order.add(entry, entry.hits)

    def remove(self, entry: CacheEntry) -> None:
        assert entry.saved is not None
        del self.entries[entry]
        self._order.remove(entry)
        self.tokens -= entry.length
        self.bytes -= entry.saved.nbytes
        entry.saved = None

    def oldest(self) -> CacheEntry:
        return self._order.peek()

    def __len__(self) -> int:
        return len(self.entries)

    def check(self, entries: list[CacheEntry]) -> None:
        """These, and no others, are what is held."""
        tokens, size = sum(entry.length for entry in entries), sum(_bytes_of(entry) for entry in entries)
        if any(entry.slot is not None or entry not in self._order for entry in entries):
            raise AssertionError("a saved sequence is in a slot, or not evictable")
        if len(self.entries) != len(self._order):
            raise AssertionError("what is stored is not what is evictable")
        if (len(entries), tokens, size) != (len(self), self.tokens, self.bytes):
            raise AssertionError(f"{len(entries)} sequences of {size} bytes are stored, {self.bytes} bytes counted")
        if size > self.capacity:
            raise AssertionError(f"{size} bytes are stored, {self.capacity} are allowed")


def _bytes_of(entry: CacheEntry) -> int:
    return 0 if entry.saved is None else entry.saved.nbytes
