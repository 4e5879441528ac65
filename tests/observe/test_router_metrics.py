"""Metrics of a cluster's router: what is counted, under which names, read at the scrape."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cllm.observe.router_metrics import RouterMetrics


class Cluster:
    """What the metrics ask at each scrape."""

    def __init__(self) -> None:
        self.replicas = {"running": 3, "silent": 1}
        self.blocks = 1000
        self.streams = 7
        self.asked = 0

    def metrics(self, prefix: str = "cllm") -> RouterMetrics:
        return RouterMetrics(
            prefix, replicas=self._replicas, index_blocks=lambda: self.blocks, streams=lambda: self.streams
        )

    def _replicas(self) -> dict[str, int]:
        self.asked += 1
        return self.replicas


def scrape(metrics: RouterMetrics) -> dict[str, float]:
    """Values by name and labels, as in the text."""
    registry = CollectorRegistry()
    registry.register(metrics)
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{label}={value}" for label, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


def test_before_the_first_request_there_are_zeros() -> None:
    samples = scrape(Cluster().metrics())
    for name in (
        "router_resumed_streams_total",
        "router_failed_requests_total",
        "router_expected_hit_tokens_total",
        "router_prompt_tokens_total",
        "router_decision_seconds_count",
    ):
        assert samples[f"cllm_{name}{{}}"] == 0


def test_requests_are_counted_by_replica_and_decisions_together() -> None:
    metrics = Cluster().metrics()
    metrics.routed("one", 3e-5, 0, 100)
    metrics.routed("two", 3e-4, 64, 100)
    metrics.routed("one", 2.0, 32, 50)
    samples = scrape(metrics)
    assert samples["cllm_router_requests_total{replica=one}"] == 2
    assert samples["cllm_router_requests_total{replica=two}"] == 1
    assert samples["cllm_router_expected_hit_tokens_total{}"] == 96
    assert samples["cllm_router_prompt_tokens_total{}"] == 250
    assert samples["cllm_router_decision_seconds_count{}"] == 3
    assert samples["cllm_router_decision_seconds_sum{}"] == 3e-5 + 3e-4 + 2.0
    assert samples["cllm_router_decision_seconds_bucket{le=5e-05}"] == 1
    assert samples["cllm_router_decision_seconds_bucket{le=0.1}"] == 2
    assert samples["cllm_router_decision_seconds_bucket{le=+Inf}"] == 3


def test_what_went_wrong_is_counted_by_kind() -> None:
    metrics = Cluster().metrics()
    for reason in ("died", "draining", "died"):
        metrics.retried(reason)
    metrics.resumed()
    metrics.resumed()
    metrics.failed()
    samples = scrape(metrics)
    assert samples["cllm_router_retries_total{reason=died}"] == 2
    assert samples["cllm_router_retries_total{reason=draining}"] == 1
    assert samples["cllm_router_resumed_streams_total{}"] == 2
    assert samples["cllm_router_failed_requests_total{}"] == 1


def test_a_scrape_reads_the_cluster_as_it_is_then() -> None:
    cluster = Cluster()
    metrics = cluster.metrics()
    before = scrape(metrics)
    assert before["cllm_replicas{state=running}"] == 3 and before["cllm_replicas{state=silent}"] == 1
    assert before["cllm_router_index_blocks{}"] == 1000 and before["cllm_ingress_streams{}"] == 7
    cluster.replicas, cluster.blocks, cluster.streams = {"running": 4}, 0, 8
    after = scrape(metrics)
    assert after["cllm_replicas{state=running}"] == 4 and after["cllm_replicas{state=silent}"] == 0
    assert after["cllm_router_index_blocks{}"] == 0 and after["cllm_ingress_streams{}"] == 8


def test_a_replica_that_is_gone_is_forgotten_and_the_sums_stay() -> None:
    metrics = Cluster().metrics()
    metrics.routed("one", 1e-4, 16, 32)
    metrics.routed("two", 1e-4, 16, 32)
    metrics.forget("one")
    metrics.forget("never there")
    samples = scrape(metrics)
    assert "cllm_router_requests_total{replica=one}" not in samples
    assert samples["cllm_router_requests_total{replica=two}"] == 1
    assert samples["cllm_router_prompt_tokens_total{}"] == 64


def test_registering_asks_nothing_of_a_router_that_has_not_started() -> None:
    cluster = Cluster()
    CollectorRegistry().register(cluster.metrics())
    assert cluster.asked == 0


def test_the_prefix_can_be_chosen() -> None:
    assert {name.partition("_")[0] for name in scrape(Cluster().metrics("other"))} == {"other"}
