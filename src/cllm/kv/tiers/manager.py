"""What both managers do with the tiers below them: waiting for loads, deadlines, throttling writes, reporting."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from cllm.kv.manager import KVManager
from cllm.kv.sequence import KVSequence
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.kv.tiers.loads import NO_LOAD, Load
from cllm.kv.usage import DiskNumbers

LOOK_S = 0.25
"""How often numbers are published while something is written and nothing else happens."""


class TieredKVManager(KVManager):
    _clock: Callable[[], float]
    _disk: DiskTier | None = None
    _loads: list[Load]

    @abstractmethod
    def _find_load(self, sequence: KVSequence) -> Load | None:
        """The load a sequence should wait for. None: ask again, there is no room or the tiers are not ready."""

    @abstractmethod
    def _finish_load(self, load: Load) -> None:
        """Add what arrived intact to the cache."""

    def use_disk(self, tier: DiskTier) -> None:
        """From now on keep K/V on disk, and find them there."""
        self._disk = tier
        tier.on_arrival = self._notify_arrival

    def _notify_arrival(self) -> None:
        """From other threads."""
        if self.on_arrival is not None:
            self.on_arrival()

    @property
    def loading(self) -> int:
        return len(self._loads)

    @property
    def _has_tiers(self) -> bool:
        """Whether there is a tier to load from."""
        return self._disk is not None

    def _share_token_time(self) -> None:
        if self._disk is not None:
            self._disk.token_s = self.token_s

    def fetch(self, sequence: KVSequence) -> bool:
        if not self._has_tiers:
            return False
        self._share_token_time()
        self._collect_loads()
        load = sequence.load
        assert load is None or isinstance(load, Load)
        if load is not None and not load.finished:
            if not load.abandoned:
                return True
            sequence.load = NO_LOAD  # computing is safer now
            return False
        if load is NO_LOAD or (load is not None and load.requester is sequence and not load.more):
            return False  # what arrived is in the cache; the rest is computed
        late = any(other.abandoned for other in self._loads)
        sequence.load = load = NO_LOAD if late else self._find_load(sequence)
        return load is not None and not load.finished

    def _collect_loads(self) -> None:
        """Finish loads that have arrived, and abandon those past their deadline."""
        if not self._loads:
            return
        now = self._clock()
        for load in list(self._loads):
            if load.arrived:
                self._loads.remove(load)
                self._finish_load(load)
            elif now >= load.deadline and not load.abandoned:
                load.cancel()

    def _throttle_writes(self, busy: bool) -> None:
        """Throttle the writer while sequences run."""
        if self._disk is not None:
            self._disk.store.writer.throttle.note(self._disk, answering=busy)

    def _disk_due_at(self) -> float | None:
        """The next deadline of a load; or soon while something is written, to keep the published numbers fresh."""
        moments = [load.deadline for load in self._loads if not load.abandoned]
        if self._disk is not None and self._disk.store.writer.queued_bytes:
            moments.append(self._clock() + LOOK_S)
        return min(moments, default=None)

    def _end_loads(self, seconds: float) -> None:
        """Cancel all loads and wait for the reader, at most `seconds` of real time."""
        for load in self._loads:
            load.cancel()
        until = monotonic() + seconds
        while self._loads and monotonic() < until:
            if self._disk is not None:
                self._disk.store.flush(0.0)
            self._collect_loads()
            sleep(0.001)

    def _disk_details(self) -> dict[str, Any] | None:
        if self._disk is None:
            return None
        stats = self._disk.store.stats()
        return {
            "directory": stats.directory,
            "limit_bytes": stats.limit,
            "bytes": stats.bytes,
            "blocks": stats.blocks,
            "known": self._disk.model_store is not None,
            "loading": self.loading,
            "write_bytes_per_s": round(stats.write_bytes_per_s),
            "read_bytes_per_s": round(stats.read_bytes_per_s),
            "trouble": stats.trouble,
            "counts": dict(stats.counts),
        }

    def _disk_numbers(self) -> DiskNumbers:
        return DiskNumbers() if self._disk is None else self._disk.numbers(self.loading)
