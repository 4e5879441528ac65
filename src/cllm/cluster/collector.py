"""The metrics of a cluster: those of each replica's engine, and those of the router in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from cllm.cluster.messages import Report
from cllm.observe.metrics import EngineCollector

_Labels = tuple[str, tuple[tuple[str, str], ...]]


class ClusterCollector(Collector):
    """`sources`: the families of each model, read at each scrape."""

    def __init__(self, sources: Sequence[Callable[[], Iterable[Metric]]]) -> None:
        self._sources = sources

    def describe(self) -> list[Metric]:
        """Empty, so that registering asks nothing of a cluster that has not started."""
        return []

    def collect(self) -> Iterator[Metric]:
        return iter(_united(family for source in self._sources for family in source()))


def replica_families(prefix: str, model: str, replica: str, report: Report) -> Iterator[Metric]:
    """All metrics of a replica's engine, with one more label."""
    engine = EngineCollector(prefix, lambda: model, lambda: report.snapshot, report.observer)
    for family in engine.collect():
        family.samples = [each._replace(labels={**each.labels, "replica": replica}) for each in family.samples]
        yield family


def _united(families: Iterable[Metric]) -> list[Metric]:
    """One family of each name. Samples with the same labels, which only routers of several models have, are added."""
    united: dict[str, Metric] = {}
    samples: dict[str, dict[_Labels, Sample]] = {}
    for family in families:
        united.setdefault(family.name, family)
        found = samples.setdefault(family.name, {})
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            before = found.get(key)
            found[key] = sample if before is None else before._replace(value=before.value + sample.value)
    for name, family in united.items():
        family.samples = list(samples[name].values())
    return list(united.values())
