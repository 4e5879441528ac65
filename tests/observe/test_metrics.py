"""Prometheus metrics: known names, right numbers, nothing that waits."""

from __future__ import annotations

import threading
from array import array
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cllm.config import Config
from cllm.observe.metrics import EngineCollector, Histogram, MetricsObserver, create_registry
from http_kit import client_for, config_with
from metrics_kit import KV, SNAPSHOT, record
from scripted_llm import ScriptedLLM

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name, frozenset(sample.labels.items())] = sample.value
    return samples


class Engine(ScriptedLLM):
    """One whose state is known."""

    state = SNAPSHOT

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.executor.snapshot = lambda: self.state  # type: ignore[method-assign]


async def scrape(llm: ScriptedLLM) -> Samples:
    async with client_for(llm) as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    return parse(response.text)


def labels(**more: str) -> frozenset[tuple[str, str]]:
    return frozenset({"model_name": "tiny", **more}.items())


@pytest.mark.parametrize(
    ("name", "more", "value"),
    [
        ("num_requests_running", {}, 2),
        ("num_requests_waiting", {}, 5),
        ("kv_cache_usage_perc", {}, 0.1),
        ("prefix_cache_queries_total", {}, 200),
        ("prefix_cache_hits_total", {}, 150),
        ("num_preemptions_total", {}, 3),
        ("prompt_tokens_total", {}, 200),
        ("prompt_tokens_cached_total", {}, 150),
        ("generation_tokens_total", {}, 99),
        ("request_success_total", {"finished_reason": "stop"}, 4),
        ("request_success_total", {"finished_reason": "cancelled"}, 2),
        ("kv_blocks", {"state": "free"}, 60),
        ("kv_blocks", {"state": "evictable"}, 30),
        ("kv_blocks", {"state": "referenced"}, 10),
        ("kv_bytes", {"state": "evictable"}, 30 * 1024),
        ("kv_group_blocks", {"group": "full", "state": "used"}, 8),
        ("kv_group_blocks", {"group": "window", "state": "evictable"}, 1),
        ("kv_group_bytes", {"group": "full", "state": "evictable"}, 28 * 1024),
        ("kv_group_bytes", {"group": "window", "state": "used"}, 2048),
        ("kv_snapshots", {}, 2),
        ("kv_snapshots_taken_total", {}, 9),
        ("kv_snapshots_used_total", {}, 4),
        ("kv_snapshots_dropped_total", {}, 7),
        ("kv_peak_bytes", {}, 55 * 1024),
        ("kv_bytes_per_token", {}, 64),
        ("kv_sequences", {"state": "held"}, 3),
        ("kv_evictions_total", {}, 7),
        ("kv_free_segments", {}, 4),
        ("kv_largest_free_span", {}, 40),
        ("kv_compactions_total", {}, 2),
        ("kv_moved_bytes_total", {}, 4096),
        ("kv_allocation_failures_total", {}, 1),
        ("batch_splits_total", {}, 6),
        ("spec_decode_num_draft_tokens_total", {}, 96),
        ("spec_decode_num_accepted_tokens_total", {}, 72),
        ("engine_steps_total", {}, 11),
        ("backend_rebuilds_total", {}, 1),
        ("position_mismatches_total", {}, 1),
        ("step_token_budget", {}, 128),
    ],
)
async def test_the_snapshot_under_its_names(name: str, more: dict[str, str], value: float) -> None:
    samples = await scrape(Engine())
    assert samples[f"cllm:{name}", labels(**more)] == value


async def test_a_scrape_reads_the_engine_as_it_is_then() -> None:
    llm = Engine()
    async with client_for(llm) as client:
        for running in (1, 9):
            llm.state = SNAPSHOT._replace(running=running, kv=KV._replace(evictions=running))
            samples = parse((await client.get("/metrics")).text)
            assert samples["cllm:num_requests_running", labels()] == running
            assert samples["cllm:kv_evictions_total", labels()] == running


async def test_the_observer_of_the_app_fills_the_histograms() -> None:
    llm = ScriptedLLM()
    async with client_for(llm) as client:
        (observer,) = llm.observers
        observer.on_finished(record())
        observer.on_step(0.012, 100, 3)
        observer.on_eviction(2, 5e-5)
        samples = parse((await client.get("/metrics")).text)
    for name, bound, below, total in [
        ("time_to_first_token_seconds", "0.5", "0.25", 0.3),
        ("e2e_request_latency_seconds", "0.5", "0.25", 0.39),
        ("request_queue_time_seconds", "0.025", "0.01", 0.02),
        ("request_prefill_time_seconds", "0.5", "0.25", 0.28),
        ("request_decode_time_seconds", "0.1", "0.05", 0.09),
        ("iteration_tokens_total", "128.0", "64.0", 103),
        ("engine_step_seconds", "0.025", "0.01", 0.012),
        ("kv_eviction_seconds", "0.0001", "1e-05", 5e-5),
    ]:
        assert samples[f"cllm:{name}_bucket", labels(le=bound)] == 1
        assert samples[f"cllm:{name}_bucket", labels(le=below)] == 0
        assert samples[f"cllm:{name}_sum", labels()] == pytest.approx(total)
        assert samples[f"cllm:{name}_count", labels()] == 1
    assert samples["cllm:inter_token_latency_seconds_count", labels()] == 2
    assert samples["cllm:inter_token_latency_seconds_sum", labels()] == pytest.approx(0.085)
    assert samples["cllm:inter_token_latency_seconds_bucket", labels(le="0.05")] == 2
    assert samples["cllm:inter_token_latency_seconds_bucket", labels(le="0.025")] == 0


async def test_histograms_are_there_before_the_first_request() -> None:
    samples = await scrape(ScriptedLLM())
    assert samples["cllm:time_to_first_token_seconds_count", labels()] == 0
    assert samples["cllm:inter_token_latency_seconds_bucket", labels(le="0.001")] == 0
    assert samples["cllm:inter_token_latency_seconds_bucket", labels(le="10.0")] == 0


def test_a_request_that_never_got_a_token_counts_only_where_it_can() -> None:
    observer = MetricsObserver()
    observer.on_finished(record(reason="timeout", ttft_s=None, inter_token_s=array("f")))
    observer.on_finished(record(inter_token_s=array("f")))
    counts = {name: int(histogram.counts.sum()) for name, histogram in observer.histograms.items()}
    assert counts["e2e_request_latency_seconds"] == counts["request_queue_time_seconds"] == 2
    assert counts["time_to_first_token_seconds"] == counts["request_decode_time_seconds"] == 1
    assert counts["inter_token_latency_seconds"] == 0


def test_one_by_one_and_all_at_once_count_the_same() -> None:
    values = [0.0, 1.0, 1.5, 2.0, 2.5, 99.0]
    one_by_one, at_once = Histogram("", (1.0, 2.0)), Histogram("", (1.0, 2.0))
    for value in values:
        one_by_one.observe(value)
    at_once.observe_all(values)
    assert one_by_one.buckets() == at_once.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 6.0)]
    assert one_by_one.sum == at_once.sum == sum(values)


def test_scrapes_while_the_engine_writes_never_go_backwards() -> None:
    observer = MetricsObserver()
    registry = create_registry(EngineCollector("cllm", lambda: "tiny", lambda: SNAPSHOT, observer))
    done = threading.Event()

    def engine() -> None:
        for _ in range(300):
            observer.on_finished(record())
            observer.on_step(0.01, 0, 8)
        done.set()

    thread = threading.Thread(target=engine)
    thread.start()
    seen = 0.0
    while not done.is_set():
        count = parse(generate_latest(registry).decode())["cllm:engine_step_seconds_count", labels()]
        assert count >= seen
        seen = count
    thread.join()
    samples = parse(generate_latest(registry).decode())
    assert samples["cllm:engine_step_seconds_count", labels()] == 300
    assert samples["cllm:inter_token_latency_seconds_count", labels()] == 600


async def test_the_prefix_can_be_vllms_and_the_model_has_its_alias() -> None:
    config = Config.model_validate({"server": {"metrics_prefix": "vllm"}, "model": {"alias": "best"}})
    samples = await scrape(Engine(config))
    assert samples["vllm:num_requests_running", frozenset({("model_name", "best")})] == 2
    assert not [name for name, _ in samples if name.startswith("cllm")]


async def test_two_servers_in_one_process_do_not_share_metrics() -> None:
    first, second = ScriptedLLM(), ScriptedLLM(config_with(metrics_prefix="other"))
    assert ("cllm:num_requests_running", labels()) in await scrape(first)
    assert ("other:num_requests_running", labels()) in await scrape(second)


async def test_the_memory_of_the_process_is_there() -> None:
    assert (await scrape(ScriptedLLM()))["process_resident_memory_bytes", frozenset()] > 0


def test_registering_asks_nothing_of_an_engine_that_has_not_started() -> None:
    def not_yet() -> None:
        raise AssertionError("the engine has not started")

    create_registry(EngineCollector("cllm", not_yet, not_yet, MetricsObserver()))  # type: ignore[arg-type]
