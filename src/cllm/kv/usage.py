"""The cache in plain numbers, published as one immutable snapshot so that readers never wait."""

from __future__ import annotations

from typing import Any, NamedTuple

from cllm.kv.groups import GroupKind


class DiskNumbers(NamedTuple):
    """The disk tier since the start; all zero without one."""

    loads: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    """Loads that brought less than was asked for, or were too late."""
    written_bytes: int = 0
    read_bytes: int = 0
    queued_bytes: int = 0
    """Waiting to be written."""
    loading: int = 0
    """Loads under way."""
    bytes: int = 0
    """In the directory, of all models and servers, at the last survey."""
    limit_bytes: int = 0


class HostNumbers(NamedTuple):
    """The host-memory tier of a GPU backend since the start; all zero without one."""

    limit_bytes: int = 0
    bytes: int = 0
    """Held now."""
    loads: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    out_bytes: int = 0
    """Copied from the device."""
    in_bytes: int = 0
    """Copied back."""


class GroupUsage(NamedTuple):
    """What layers with equal needs hold, in blocks of their own size. It counts in the cache's units, too."""

    kind: GroupKind
    block_bytes: int
    used: int
    """By running sequences and pins."""
    evictable: int


class KVUsage(NamedTuple):
    """The cache at one moment. A unit is a block (paged) or one token's cell (slots).

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
    """Sequences that do not run; paged: leaves of the prefix tree that nothing uses, and pins."""
    free_segments: int
    largest_free_span: int
    evictions: int
    allocation_failures: int
    compactions: int
    moved_bytes: int
    query_tokens: int
    hit_tokens: int
    # Memory is taken from the OS and given back in extents: groups of adjacent units.
    extents_used: int = 0
    extents_needed: int = 0
    """Extents needed if everything were packed without holes."""
    extents_ready: int = 0
    """Empty, backed by memory."""
    extents_fresh: int = 0
    """Empty, not backed by memory: not taken yet, or given back."""
    extent_bytes: int = 0
    contiguity: float = 1.0
    """The share of neighbours in running sequences' block tables that are neighbours in memory."""
    resident_bytes: int = 0
    """Resident memory. Paged: as the OS last said; it is asked now and then while nothing runs. Slots: counted."""
    released_bytes: int = 0
    prepared_bytes: int = 0
    upkeep_failures: int = 0
    """Moves, releases and preparations that failed."""
    slots: int = 0
    """Slots with memory; 0 on paged backends."""
    context_rebuilds: int = 0
    """Times the backend's context was recreated with more or fewer slots."""
    disk: DiskNumbers = DiskNumbers()
    host: HostNumbers = HostNumbers()
    pins: int = 0
    pinned: int = 0
    """Units held by pins. They count as referenced."""
    pins_refused: int = 0
    known_tokens: int = 0
    """Paged: those that layers which attend to everything had cached; more than were hit where others kept too
    little."""
    groups: tuple[GroupUsage, ...] = ()
    """Paged: of layers that attend to everything, and of those that keep something else."""
    snapshots: int = 0
    """Places of cached prefixes that keep what layers other than full ones need to go on there."""
    snapshots_taken: int = 0
    """Since the start, as what follows."""
    snapshots_used: int = 0
    snapshots_dropped: int = 0
    windows_rebuilt: int = 0
    """Requests whose windows were computed again, because that was nearer than a snapshot."""
    blocks_stored: int = 0
    """Blocks added to the prefix tree since the start."""
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
        groups = [group._asdict() for group in self.groups]
        return {**self._asdict(), "disk": self.disk._asdict(), "host": self.host._asdict(), "groups": groups}

    @property
    def used_fraction(self) -> float:
        """The share of memory that running sequences and pins hold; what is merely cached does not count."""
        return self.referenced / self.total if self.total else 0.0
