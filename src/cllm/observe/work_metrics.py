"""Metrics of the worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cllm.work.pool import Workers


class WorkCollector(Collector):
    def __init__(self, prefix: str, workers: Callable[[], Workers | None]) -> None:
        """`workers`: None before they exist."""
        self._prefix = prefix
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        prefix, workers = self._prefix, self._workers()
        if workers is None:
            return
        yield GaugeMetricFamily(f"{prefix}:work_running", "Jobs in worker processes.", workers.running)
        yield GaugeMetricFamily(f"{prefix}:work_waiting", "Jobs waiting for a worker process.", workers.waiting)
        jobs = CounterMetricFamily(
            f"{prefix}:work_jobs", "Jobs of worker processes, by kind and outcome.", labels=["kind", "outcome"]
        )
        for (kind, outcome), count in list(workers.jobs.items()):
            jobs.add_metric([kind, outcome], count)
        yield jobs
        seconds = CounterMetricFamily(f"{prefix}:work_seconds", "CPU time of worker processes.", labels=["kind"])
        for kind, spent in list(workers.seconds.items()):
            seconds.add_metric([kind], spent)
        yield seconds
        of_keys = CounterMetricFamily(f"{prefix}:key_work_seconds", "CPU time of jobs of a key.", labels=["key"])
        for key, spent in list(workers.key_seconds.items()):
            of_keys.add_metric([key], spent)
        yield of_keys
