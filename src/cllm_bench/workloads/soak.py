"""The same mixed load for a long time: do latency, memory or fragmentation grow?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar

from cllm_bench.client import Client
from cllm_bench.figures import Figure, Metrics, own
from cllm_bench.response import TimedResponse
from cllm_bench.stats import slope_interval
from cllm_bench.watch import Sample, Watcher
from cllm_bench.workloads.mixed import Mixed

WINDOWS = 30
SETTLE_S = 300.0


@dataclass(frozen=True)
class Soak(Mixed):
    """Time is cut into windows, and each has its median latency. The slope over them is what degradation would show."""

    duration: float = 1800.0

    name = "soak"
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("slope_ms_per_min_low", "P50 latency slope, at least", "ms/min", limit=own(0.0)),
        Figure("slope_ms_per_min", "P50 latency slope", "ms/min"),
        Figure("memory_range_percent", "resident, range once settled", "%", limit=own(2.0)),
        Figure("fragmentation_slope", "fragmentation slope", "%/min"),
        Figure("goodput_percent", "good answers", "%", "higher"),
    )
    # A cache that is full after a minute or two, so that most of the time is spent evicting and reusing.
    cllm_settings: ClassVar[Mapping[str, Any]] = {
        "resources.max_context_length": 2048,
        "resources.kv_cache_max_memory_mb": 512,
    }

    def quick(self) -> Soak:
        return replace(self, rate=5.0, duration=6.0, prompt_most=200)

    def trends(self, watcher: Watcher, client: Client) -> Metrics:
        return latency_trend(client.answers) | sample_trends(watcher.samples)


def latency_trend(answers: Sequence[TimedResponse]) -> Metrics:
    """The slope of the windows' medians, in milliseconds per minute, with its interval."""
    complete = [answer for answer in answers if answer.complete]
    if len(complete) < WINDOWS:
        return {}
    begin, end = complete[0].started, complete[-1].started
    windows: dict[int, list[float]] = {}
    for answer in complete:
        number = min(WINDOWS - 1, int(WINDOWS * (answer.started - begin) / (end - begin)))
        windows.setdefault(number, []).append(answer.seconds * 1e3)
    minutes = [number * (end - begin) / WINDOWS / 60 for number in sorted(windows)]
    found = slope_interval(minutes, [median(windows[number]) for number in sorted(windows)])
    return {
        "slope_ms_per_min": found.estimate,
        "slope_ms_per_min_low": found.low,
        "slope_ms_per_min_high": found.high,
    }


def sample_trends(samples: Sequence[Sample]) -> Metrics:
    """Memory and fragmentation once the first minutes have filled caches and buffers."""
    if not samples:
        return {}
    settle = min(SETTLE_S, samples[-1].seconds / 6)
    settled = [sample for sample in samples if sample.seconds >= settle]
    metrics: Metrics = {}
    resident = [sample.resident_mb for sample in settled if sample.resident_mb is not None]
    if resident:
        metrics["memory_range_percent"] = 100 * (max(resident) / min(resident) - 1)
    scattered = [(s.seconds / 60, s.fragmentation_percent) for s in settled if s.fragmentation_percent is not None]
    if len(scattered) > 1:
        found = slope_interval(*zip(*scattered, strict=True))
        metrics |= {
            "fragmentation_slope": found.estimate,
            "fragmentation_slope_low": found.low,
            "fragmentation_slope_high": found.high,
        }
    return metrics
