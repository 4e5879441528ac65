"""What managers that look beyond their memory have in common: who waits for it, how long, and what is told of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from cllm.kv.loads import NOTHING, Load
from cllm.kv.manager import KVManager
from cllm.kv.sequence import KVSequence
from cllm.kv.tier import Tier
from cllm.kv.usage import TierNumbers

LOOK_S = 0.25
"""How often numbers are published while something is written, though nothing else happens."""


class Tiered(KVManager):
    _clock: Callable[[], float]
    _tier: Tier | None = None
    _loads: list[Load]

    @abstractmethod
    def _look(self, sequence: KVSequence) -> Load | None:
        """What a sequence is to wait for. None: there is no saying now, for want of room or of knowledge."""

    @abstractmethod
    def _land(self, load: Load) -> None:
        """What was read is the cache's from now on, as far as it is right."""

    def use_disk(self, tier: Tier) -> None:
        """From now on K/V are kept on disk, and found there."""
        self._tier = tier
        tier.wake = self._tell_arrival

    def _tell_arrival(self) -> None:
        """From other threads."""
        if self.on_arrival is not None:
            self.on_arrival()

    @property
    def loading(self) -> int:
        return len(self._loads)

    @property
    def _looks(self) -> bool:
        """Whether there is anywhere to look."""
        return self._tier is not None

    def _tell_speed(self) -> None:
        if self._tier is not None:
            self._tier.token_s = self.token_s

    def fetch(self, sequence: KVSequence) -> bool:
        if not self._looks:
            return False
        self._tell_speed()
        self._take_in()
        load = sequence.load
        assert load is None or isinstance(load, Load)
        if load is not None and not load.over:
            if not load.late:
                return True
            sequence.load = NOTHING  # computing is the safer way now
            return False
        if load is NOTHING or (load is not None and load.asker is sequence and not load.more):
            return False  # what came is in the cache; what did not is computed
        late = any(other.late for other in self._loads)
        sequence.load = load = NOTHING if late else self._look(sequence)
        return load is not None and not load.over

    def _take_in(self) -> None:
        """What has arrived joins the cache; what has not, though it is time, is not waited for any more."""
        if not self._loads:
            return
        now = self._clock()
        for load in list(self._loads):
            if load.arrived:
                self._loads.remove(load)
                self._land(load)
            elif now >= load.until and not load.late:
                load.cancel()

    def _say_whether_busy(self, busy: bool) -> None:
        """What is written behind answers is written without haste."""
        if self._tier is not None:
            self._tier.store.writer.pace.note(self._tier, answering=busy)

    def _disk_due_at(self) -> float | None:
        """When a load is too late; and while something is written, soon, so that what is published of it is right."""
        moments = [load.until for load in self._loads if not load.late]
        if self._tier is not None and self._tier.store.writer.queued_bytes:
            moments.append(self._clock() + LOOK_S)
        return min(moments, default=None)

    def _end_loads(self, seconds: float) -> None:
        """Nobody waits for any of them. By the time of the threads that read, whatever the cache's clock says."""
        for load in self._loads:
            load.cancel()
        until = monotonic() + seconds
        while self._loads and monotonic() < until:
            if self._tier is not None:
                self._tier.store.flush(0.0)
            self._take_in()
            sleep(0.001)

    def _disk_details(self) -> dict[str, Any] | None:
        if self._tier is None:
            return None
        stats = self._tier.store.stats()
        return {
            "directory": stats.directory,
            "limit_bytes": stats.limit,
            "bytes": stats.bytes,
            "blocks": stats.blocks,
            "known": self._tier.space is not None,
            "loading": self.loading,
            "write_bytes_per_s": round(stats.write_bytes_per_s),
            "read_bytes_per_s": round(stats.read_bytes_per_s),
            "trouble": stats.trouble,
            "counts": dict(stats.counts),
        }

    def _disk_numbers(self) -> TierNumbers:
        return TierNumbers() if self._tier is None else self._tier.numbers(self.loading)
