"""Prometheus metrics of a cluster's router and ingress.

One thread, the ingress's event loop, counts; a scrape reads without a lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cllm.observe.metrics import Histogram

REPLICA_STATES = ("running", "silent", "joining", "draining")
"""A silent replica has sent no cache events for a while; it is chosen by its load alone. One that is joining or
draining gets no requests."""

_DECISION = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 0.1)


class RouterMetrics(Collector):
    """What became of requests on their way to replicas."""

    def __init__(
        self,
        prefix: str,
        *,
        replicas: Callable[[], Mapping[str, int]],
        index_blocks: Callable[[], int],
        streams: Callable[[], int],
    ) -> None:
        """The functions are called at each scrape: replicas by state, blocks in the router's index, open streams."""
        self._prefix = prefix
        self._replicas = replicas
        self._index_blocks = index_blocks
        self._streams = streams
        self._requests: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()
        self._resumed = 0
        self._failed = 0
        self._expected_hit_tokens = 0
        self._prompt_tokens = 0
        self._decisions = Histogram("Time that choosing a replica took.", _DECISION)

    def routed(self, replica: str, seconds: float, expected_hit_tokens: int, prompt_tokens: int) -> None:
        """A request was sent to `replica`; choosing it took `seconds`."""
        self._requests[replica] += 1
        self._decisions.observe(seconds)
        self._expected_hit_tokens += expected_hit_tokens
        self._prompt_tokens += prompt_tokens

    def retried(self, reason: str) -> None:
        """A request will be sent again; it had no token yet."""
        self._retries[reason] += 1

    def resumed(self) -> None:
        """A stream goes on at another replica."""
        self._resumed += 1

    def failed(self) -> None:
        """A request ended with an error because no replica could finish it."""
        self._failed += 1

    def forget(self, replica: str) -> None:
        """The replica is gone for good. Replicas that come later have other names."""
        self._requests.pop(replica, None)

    def describe(self) -> list[Metric]:
        """Empty, so that registering asks nothing of a router that has not started."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield self._labelled("router_requests", "Requests sent to a replica.", "replica", self._requests)
        yield self._labelled(
            "router_retries", "Requests sent again before their first token, by reason.", "reason", self._retries
        )
        for name, text, value in (
            ("router_resumed_streams", "Streams that went on at another replica.", self._resumed),
            ("router_failed_requests", "Requests that no replica could finish.", self._failed),
            ("router_expected_hit_tokens", "Prompt tokens expected in a replica's cache.", self._expected_hit_tokens),
            ("router_prompt_tokens", "Prompt tokens of routed requests.", self._prompt_tokens),
        ):
            yield CounterMetricFamily(self._name(name), text, value)
        decisions = HistogramMetricFamily(self._name("router_decision_seconds"), self._decisions.help, labels=[])
        decisions.add_metric([], self._decisions.buckets(), self._decisions.sum)
        yield decisions
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            self._name("router_index_blocks"), "Blocks in the router's index of cached prefixes.", self._index_blocks()
        )
        replicas = GaugeMetricFamily(
            self._name("replicas"), "Replicas by state; silent: no cache events for a while.", labels=["state"]
        )
        found = self._replicas()
        for state in REPLICA_STATES:
            replicas.add_metric([state], found.get(state, 0))
        yield replicas
        yield GaugeMetricFamily(self._name("ingress_streams"), "Open streams of this ingress.", self._streams())

    def _labelled(self, name: str, text: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
        family = CounterMetricFamily(self._name(name), text, labels=[label])
        for value, count in list(counts.items()):
            family.add_metric([value], count)
        return family

    def _name(self, name: str) -> str:
        return f"{self._prefix}_{name}"
