"""The state of the cache as plain numbers, published whole so that readers never wait."""

from __future__ import annotations

from typing import NamedTuple


class KVUsage(NamedTuple):
    """One moment of the cache. A unit is a block (paged) or the cell of one token (slots).

    Invariant: free + evictable + referenced == total.
    """

    layout: str
    unit_tokens: int
    bytes_per_unit: int
    total: int
    free: int
    evictable: int
    referenced: int
    peak: int
    sequences_running: int
    sequences_held: int
    """Distinct sequences in the cache; for paged the ends of the prefix tree, in use or not."""
    free_segments: int
    largest_free_span: int
    evictions: int
    allocation_failures: int
    compactions: int
    moved_bytes: int
    query_tokens: int
    hit_tokens: int

    @property
    def used_fraction(self) -> float:
        """Share of the memory that running sequences need; what is merely cached does not count."""
        return self.referenced / self.total if self.total else 0.0
