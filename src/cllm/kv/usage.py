"""The state of the cache as plain numbers, published whole so that readers never wait."""

from __future__ import annotations

from typing import Any, NamedTuple


class TierNumbers(NamedTuple):
    """Of the disk, since the start; nothing is kept there: zeros."""

    loads: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    """Loads that brought less than was asked for, or came too late."""
    written_bytes: int = 0
    read_bytes: int = 0
    queued_bytes: int = 0
    """What waits to be written."""
    loading: int = 0
    """Loads under way."""
    bytes: int = 0
    """In the directory, of all models and all servers, when last looked at."""
    limit_bytes: int = 0


class HostNumbers(NamedTuple):
    """Of the host's memory, where blocks are kept beside a GPU's, since the start; there is none: zeros."""

    limit_bytes: int = 0
    bytes: int = 0
    """What is held there now."""
    loads: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    out_bytes: int = 0
    """Copied there from the device."""
    in_bytes: int = 0
    """Copied back."""


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
    # From here on: memory that is taken and given back in extents, groups of adjacent units.
    extents_used: int = 0
    extents_needed: int = 0
    """Extents that what is held would fill without holes."""
    extents_ready: int = 0
    """Empty, their memory taken from the OS."""
    extents_fresh: int = 0
    """Empty, their memory not taken, or given back."""
    extent_bytes: int = 0
    contiguity: float = 1.0
    """Of neighbours in running sequences' block tables, the share that are neighbours in memory."""
    resident_bytes: int = 0
    """What is in memory. The OS is asked for it now and then while nothing runs, so this is what was last seen; slots
    are counted instead."""
    released_bytes: int = 0
    prepared_bytes: int = 0
    upkeep_failures: int = 0
    """Moves, releases and preparations that the backend refused."""
    slots: int = 0
    """Slots that have memory; 0 on paged backends."""
    context_rebuilds: int = 0
    """Times the backend's context was made anew with more or fewer slots."""
    disk: TierNumbers = TierNumbers()
    host: HostNumbers = HostNumbers()
    pins: int = 0
    pinned: int = 0
    """Units that pins use. They count as referenced, whoever else uses them."""
    pins_refused: int = 0
    blocks_stored: int = 0
    """Blocks that have come into the prefix tree since the start; paged backends."""
    blocks_removed: int = 0

    def in_bytes(self) -> dict[str, int]:
        units = {
            "total": self.total,
            "free": self.free,
            "evictable": self.evictable,
            "referenced": self.referenced,
            "peak": self.peak,
        }
        return {state: count * self.bytes_per_unit for state, count in units.items()}

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "disk": self.disk._asdict(), "host": self.host._asdict()}

    @property
    def used_fraction(self) -> float:
        """Share of the memory that running sequences need, and pins; what is merely cached does not count."""
        return self.referenced / self.total if self.total else 0.0
