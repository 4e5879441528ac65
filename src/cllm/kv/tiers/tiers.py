"""The slower memory below one manager: host memory beside a GPU, and disk. Either may be missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cllm.kv.disk.store import ModelStore
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.kv.tiers.host_tier import HostTier
from cllm.kv.usage import DiskNumbers, HostNumbers

LOOK_S = 0.25
"""How often numbers are published while something is written and nothing else happens."""


class Tiers:
    def __init__(self, clock: Callable[[], float], notify: Callable[[], None]) -> None:
        """`notify` is called, also from other threads, when a load has ended or loads have become possible."""
        self.disk: DiskTier | None = None
        self.host: HostTier | None = None
        self.notify = notify
        self._clock = clock

    def use_disk(self, tier: DiskTier) -> None:
        self.disk = tier
        tier.on_arrival = self.notify

    def __bool__(self) -> bool:
        """Whether there is any."""
        return self.disk is not None or self.host is not None

    @property
    def model_store(self) -> ModelStore | None:
        """This model's part of the disk. None: it cannot be used, yet or any more."""
        return None if self.disk is None else self.disk.model_store

    def know_speed(self, token_s: float) -> None:
        """Computing a token takes so long, and loading must beat it."""
        if self.disk is not None:
            self.disk.token_s = token_s
        if self.host is not None:
            self.host.token_s = token_s

    def flush(self) -> None:
        """Have what is queued for the disk written now, without waiting for that."""
        if self.disk is not None:
            self.disk.store.flush(0.0)

    def throttle_writes(self, busy: bool) -> None:
        """Throttle the writer while sequences run."""
        if self.disk is not None:
            self.disk.store.writer.throttle.note(self.disk, answering=busy)

    def look_at(self) -> float | None:
        """When the published numbers need refreshing because something is being written."""
        writing = self.disk is not None and self.disk.store.writer.queued_bytes
        return self._clock() + LOOK_S if writing else None

    # -- reporting ---------------------------------------------------------------------------------------------

    def disk_details(self, loading: int) -> dict[str, Any] | None:
        if self.disk is None:
            return None
        stats = self.disk.store.stats()
        return {
            "directory": stats.directory,
            "limit_bytes": stats.limit,
            "bytes": stats.bytes,
            "blocks": stats.blocks,
            "known": self.model_store is not None,
            "loading": loading,
            "write_bytes_per_s": round(stats.write_bytes_per_s),
            "read_bytes_per_s": round(stats.read_bytes_per_s),
            "trouble": stats.trouble,
            "counts": dict(stats.counts),
        }

    def host_details(self) -> dict[str, Any] | None:
        return None if self.host is None else self.host.details()

    def disk_numbers(self, loading: int) -> DiskNumbers:
        return DiskNumbers() if self.disk is None else self.disk.numbers(loading)

    def host_numbers(self) -> HostNumbers:
        return HostNumbers() if self.host is None else self.host.numbers()
