"""What happened, counted while it is simulated."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.engine.observer import RequestRecord

if TYPE_CHECKING:
    from cllm_bench.simulate.server import SimulatedServer

_SMALLEST_S = 1e-7
_BUCKETS_PER_OCTAVE = 64
_BUCKETS = 40 * _BUCKETS_PER_OCTAVE
"""Gaps are counted in buckets 1 % wide, from 0.1 us to a day."""

_KEPT_SAMPLES = 512


class Sample(NamedTuple):
    """The memory at one moment, as shares of all of it."""

    seconds: float
    taken: float
    """Held by running sequences."""
    cached: float
    """Holding what may be found again."""
    running: int
    waiting: int


class Tally:
    def __init__(self) -> None:
        self.steps = 0
        self.computed_tokens = 0
        self.too_large = 0
        self.turned_away = 0
        self.ends: Counter[str] = Counter()
        self.answer_tokens = 0
        self.prompts_s = self.saved_s = 0.0
        """What computing all prompts would have taken, and what was saved of that, because it was found."""
        self.last_end = 0.0
        self.first_arrival = math.inf
        self.ttft: array[float] = array("d")
        self.total: array[float] = array("d")
        self.gaps: NDArray[np.int64] = np.zeros(_BUCKETS, dtype=np.int64)
        self.samples: list[Sample] = []
        self._sample_every = 1
        self._until_sample = 1

    @property
    def ended(self) -> int:
        return sum(self.ends.values())

    def take(self, record: RequestRecord, server: SimulatedServer) -> None:
        self.ends[record.reason] += 1
        self.answer_tokens += record.generated_tokens
        self.prompts_s += server.cost.prompt(record.prompt_tokens)
        self.saved_s += server.cost.prompt(record.cached_tokens)
        self.last_end = max(self.last_end, server.now)
        self.first_arrival = min(self.first_arrival, server.now - record.total_s)
        if record.error is None and record.ttft_s is not None:
            self.ttft.append(record.ttft_s)
            self.total.append(record.total_s)
            self._count_gaps(record.inter_token_s)
        self._look(server)

    def _count_gaps(self, gaps: array[float]) -> None:
        if gaps:
            seconds = np.frombuffer(gaps, dtype=np.float32)
            buckets = (np.log2(np.maximum(seconds, _SMALLEST_S) / _SMALLEST_S) * _BUCKETS_PER_OCTAVE).astype(np.intp)
            np.add.at(self.gaps, np.minimum(buckets, _BUCKETS - 1), 1)

    def _look(self, server: SimulatedServer) -> None:
        self._until_sample -= 1
        if self._until_sample:
            return
        self._until_sample = self._sample_every
        usage = server.kv.usage()
        taken, cached = usage.referenced / usage.total, usage.evictable / usage.total
        scheduler = server.scheduler
        running, waiting = len(scheduler.requests.running), len(scheduler.requests.waiting)
        self.samples.append(Sample(server.now, taken, cached, running, waiting))
        if len(self.samples) >= 2 * _KEPT_SAMPLES:
            del self.samples[::2]
            self._sample_every *= 2

    def gap_percentile(self, share: float) -> float:
        """Seconds between two tokens of an answer; the middle of the bucket."""
        total = int(self.gaps.sum())
        if total == 0:
            return math.nan
        bucket = int(np.searchsorted(np.cumsum(self.gaps), share * total))
        return float(_SMALLEST_S * 2 ** ((min(bucket, _BUCKETS - 1) + 0.5) / _BUCKETS_PER_OCTAVE))


def percentile(values: array[float], share: float) -> float:
    return float(np.quantile(np.frombuffer(values, dtype=np.float64), share)) if values else math.nan
