"""Prometheus metrics with vLLM's names and cLLM's prefix.

Counters and gauges are read from the engine's snapshot at each scrape, so no number is kept twice and a scrape never
waits for the engine. Histograms are filled by the engine thread alone and read without a lock: a scrape during an
update may miss the newest value, but never sees a broken one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from cllm.engine.observer import RequestRecord
    from cllm.engine.stats import EngineSnapshot
    from cllm.kv.ledger import AccountStatus
    from cllm.work.pool import Workers

_MILLISECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
_STEP = (*_MILLISECONDS, 1.0, 2.5, 5.0, 10.0)
_REQUEST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_EVICTION = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)


class Histogram:
    """Counts per bucket. One thread writes, any thread reads."""

    def __init__(self, help_text: str, bounds: Sequence[float]) -> None:
        self.help = help_text
        self.bounds = tuple(bounds)
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        found = np.searchsorted(self.bounds, values, side="left")
        self.counts += np.bincount(found, minlength=len(self.counts))
        self.sum += float(np.sum(values))

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus wants them."""
        bounds = [*map(repr, self.bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts.tolist())), strict=True))


class MetricsObserver:
    """Fills the histograms; an `EngineObserver`."""

    def __init__(self) -> None:
        self.histograms = {
            "time_to_first_token_seconds": Histogram("Time from arrival to the first token.", _REQUEST),
            "inter_token_latency_seconds": Histogram("Time between two tokens of an answer.", _STEP),
            "e2e_request_latency_seconds": Histogram("Time from arrival to the end.", _REQUEST),
            "request_queue_time_seconds": Histogram("Time spent waiting for the first step.", _REQUEST),
            "request_prefill_time_seconds": Histogram("Time spent computing the prompt.", _REQUEST),
            "request_decode_time_seconds": Histogram("Time from the first token to the last.", _REQUEST),
            "iteration_tokens_total": Histogram("Tokens per engine step.", _TOKENS),
            "engine_step_seconds": Histogram("Duration of an engine step.", _STEP),
            "kv_eviction_seconds": Histogram("Duration of a round of evictions.", _EVICTION),
        }

    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None:
        self.histograms["engine_step_seconds"].observe(seconds)
        self.histograms["iteration_tokens_total"].observe(prompt_tokens + decode_tokens)

    def on_finished(self, record: RequestRecord) -> None:
        observed = self.histograms
        observed["e2e_request_latency_seconds"].observe(record.total_s)
        observed["request_queue_time_seconds"].observe(record.queued_s)
        if record.ttft_s is None:
            return
        observed["time_to_first_token_seconds"].observe(record.ttft_s)
        observed["request_prefill_time_seconds"].observe(record.prefill_s)
        observed["request_decode_time_seconds"].observe(record.decode_s)
        if len(record.inter_token_s):
            observed["inter_token_latency_seconds"].observe_all(record.inter_token_s)

    def on_eviction(self, count: int, seconds: float) -> None:
        self.histograms["kv_eviction_seconds"].observe(seconds)


class _Value(NamedTuple):
    """A gauge or counter; with labels, one value for each of theirs."""

    name: str
    help: str
    value: Callable[[EngineSnapshot], float | Mapping[str, float] | Mapping[tuple[str, ...], float]]
    labels: tuple[str, ...] = ()


def _kv_units(snapshot: EngineSnapshot) -> dict[str, float]:
    kv = snapshot.kv
    return {"free": kv.free, "evictable": kv.evictable, "referenced": kv.referenced}


def _kv_bytes(snapshot: EngineSnapshot) -> dict[str, float]:
    return {state: units * snapshot.kv.bytes_per_unit for state, units in _kv_units(snapshot).items()}


def _group_bytes(snapshot: EngineSnapshot) -> dict[tuple[str, ...], float]:
    return {place: blocks * size for place, (blocks, size) in _groups(snapshot).items()}


def _group_blocks(snapshot: EngineSnapshot) -> dict[tuple[str, ...], float]:
    return {place: blocks for place, (blocks, _) in _groups(snapshot).items()}


def _groups(snapshot: EngineSnapshot) -> dict[tuple[str, ...], tuple[int, int]]:
    """Blocks, and the bytes of one, by group and state."""
    return {
        (group.kind, state): (blocks, group.block_bytes)
        for group in snapshot.kv.groups
        for state, blocks in (("used", group.used), ("evictable", group.evictable))
    }


def _kv_extents(snapshot: EngineSnapshot) -> dict[str, float]:
    kv = snapshot.kv
    return {"used": kv.extents_used, "needed": kv.extents_needed, "ready": kv.extents_ready, "fresh": kv.extents_fresh}


_GAUGES = (
    _Value("num_requests_running", "Requests being computed.", lambda s: s.running),
    _Value("num_requests_waiting", "Requests in the queue.", lambda s: s.waiting),
    _Value(
        "kv_cache_usage_perc",
        "Share of the KV cache used by running requests and pins, 0 to 1.",
        lambda s: s.kv.used_fraction,
    ),
    _Value("kv_blocks", "Blocks (paged backends) or token cells (slots) of the KV cache.", _kv_units, ("state",)),
    _Value("kv_bytes", "Bytes of the KV cache.", _kv_bytes, ("state",)),
    _Value(
        "kv_peak_bytes", "Peak of the KV bytes used by running requests.", lambda s: s.kv.peak * s.kv.bytes_per_unit
    ),
    _Value("kv_bytes_per_token", "KV bytes per token.", lambda s: s.kv.bytes_per_unit / s.kv.unit_tokens),
    _Value(
        "kv_sequences",
        "Sequences in the KV cache.",
        lambda s: {"running": s.kv.sequences_running, "held": s.kv.sequences_held},
        ("state",),
    ),
    _Value("kv_free_segments", "Number of free runs of units.", lambda s: s.kv.free_segments),
    _Value("kv_largest_free_span", "Units in the largest free run.", lambda s: s.kv.largest_free_span),
    _Value(
        "kv_contiguity_ratio",
        "Share of consecutive blocks of running sequences that are adjacent in memory.",
        lambda s: s.kv.contiguity,
    ),
    _Value(
        "kv_extents",
        "Groups of adjacent KV blocks: used, needed if there were no holes, empty with memory, empty without.",
        _kv_extents,
        ("state",),
    ),
    _Value("kv_slots", "Slots that have memory (0 on paged backends).", lambda s: s.kv.slots),
    _Value("kv_resident_bytes", "Resident KV bytes, as of the last time nothing ran.", lambda s: s.kv.resident_bytes),
    _Value("kv_host_bytes", "KV bytes in host memory, evicted from the GPU.", lambda s: s.kv.host.bytes),
    _Value("kv_host_limit_bytes", "Limit of kv_host_bytes.", lambda s: s.kv.host.limit_bytes),
    _Value("kv_disk_queued_bytes", "KV bytes waiting to be written to disk.", lambda s: s.kv.disk.queued_bytes),
    _Value("kv_disk_loading", "Loads of KV from disk in progress.", lambda s: s.kv.disk.loading),
    _Value(
        "kv_group_bytes",
        "Bytes of layers that keep all tokens (full), a window or a state; kv_bytes includes them.",
        _group_bytes,
        ("group", "state"),
    ),
    _Value("kv_group_blocks", "Blocks of each group of layers.", _group_blocks, ("group", "state")),
    _Value(
        "kv_snapshots",
        "Places of cached prefixes where layers with a window or a state can go on.",
        lambda s: s.kv.snapshots,
    ),
    _Value("kv_pins", "Pinned prefixes.", lambda s: s.kv.pins),
    _Value(
        "kv_pinned_bytes",
        "KV bytes of pinned prefixes; they count as referenced.",
        lambda s: s.kv.pinned * s.kv.bytes_per_unit,
    ),
    _Value("step_token_budget", "Token budget of the next step.", lambda s: s.step_token_budget),
    _Value("uptime_seconds", "Time since the engine started.", lambda s: s.uptime_s),
)

_STORE_GAUGES: tuple[tuple[str, str, Callable[[EngineSnapshot], float]], ...] = (
    (
        "kv_disk_bytes",
        "KV bytes on disk, of all models and servers that share the directory.",
        lambda s: s.kv.disk.bytes,
    ),
    ("kv_disk_limit_bytes", "Limit of the KV bytes on disk; 0: disabled.", lambda s: s.kv.disk.limit_bytes),
)
"""Shared by all models that keep K/V in the same directory, so without a model label."""

_COUNTERS = (
    _Value("prefix_cache_queries", "Prompt tokens looked up in the KV cache.", lambda s: s.kv.query_tokens),
    _Value("prefix_cache_hits", "Prompt tokens found in the KV cache.", lambda s: s.kv.hit_tokens),
    _Value(
        "prefix_cache_known",
        "Prompt tokens cached for layers that attend to everything; more than hits where other layers kept too little.",
        lambda s: s.kv.known_tokens,
    ),
    _Value("num_preemptions", "Preempted requests, to be computed again.", lambda s: s.preemptions),
    _Value("prompt_tokens", "Prompt tokens of all requests.", lambda s: s.prompt_tokens),
    _Value("prompt_tokens_cached", "Prompt tokens that came from the KV cache.", lambda s: s.cached_tokens),
    _Value("generation_tokens", "Generated tokens.", lambda s: s.generated_tokens),
    _Value("spec_decode_num_draft_tokens", "Drafted tokens.", lambda s: s.drafted_tokens),
    _Value("spec_decode_num_accepted_tokens", "Accepted drafted tokens.", lambda s: s.accepted_drafts),
    _Value("kv_window_dropped_tokens", "Tokens dropped by rolling windows.", lambda s: s.dropped_tokens),
    _Value("request_success", "Finished requests by reason.", lambda s: dict(s.finished), ("finished_reason",)),
    _Value("kv_evictions", "Units evicted from the KV cache.", lambda s: s.kv.evictions),
    _Value("kv_compactions", "Compactions of the KV cache.", lambda s: s.kv.compactions),
    _Value(
        "kv_moved_bytes",
        "KV bytes copied: prefixes, saving and loading, copy on write, compaction.",
        lambda s: s.kv.moved_bytes,
    ),
    _Value("kv_released_bytes", "KV bytes returned to the OS.", lambda s: s.kv.released_bytes),
    _Value("kv_prepared_bytes", "KV bytes allocated ahead of use.", lambda s: s.kv.prepared_bytes),
    _Value(
        "kv_upkeep_failures", "Failed moves, releases and preparations of KV memory.", lambda s: s.kv.upkeep_failures
    ),
    _Value(
        "kv_context_rebuilds",
        "Times the context was rebuilt with more or fewer slots.",
        lambda s: s.kv.context_rebuilds,
    ),
    _Value(
        "kv_allocation_failures", "Waits and preemptions for lack of KV memory.", lambda s: s.kv.allocation_failures
    ),
    _Value("kv_host_out_bytes", "KV bytes copied from the GPU to host memory.", lambda s: s.kv.host.out_bytes),
    _Value("kv_host_in_bytes", "KV bytes copied from host memory to the GPU.", lambda s: s.kv.host.in_bytes),
    _Value("kv_host_loads", "Finished loads of KV from host memory.", lambda s: s.kv.host.loads),
    _Value(
        "kv_host_load_failures",
        "Loads of KV from host memory that brought less than expected.",
        lambda s: s.kv.host.failed_loads,
    ),
    _Value("kv_host_hits", "Prompt tokens loaded from host memory.", lambda s: s.kv.host.loaded_tokens),
    _Value("kv_disk_written_bytes", "KV bytes written to disk.", lambda s: s.kv.disk.written_bytes),
    _Value("kv_disk_read_bytes", "KV bytes read from disk.", lambda s: s.kv.disk.read_bytes),
    _Value("kv_disk_loads", "Finished loads of KV from disk.", lambda s: s.kv.disk.loads),
    _Value(
        "kv_disk_load_failures",
        "Loads of KV from disk that brought less than expected.",
        lambda s: s.kv.disk.failed_loads,
    ),
    _Value("kv_disk_hits", "Prompt tokens loaded from disk.", lambda s: s.kv.disk.loaded_tokens),
    _Value("kv_pins_refused", "Pins that were refused.", lambda s: s.kv.pins_refused),
    _Value("kv_snapshots_taken", "Snapshots of windows and states taken.", lambda s: s.kv.snapshots_taken),
    _Value("kv_snapshots_used", "Sequences that went on from a snapshot.", lambda s: s.kv.snapshots_used),
    _Value("kv_snapshots_dropped", "Snapshots of windows and states dropped.", lambda s: s.kv.snapshots_dropped),
    _Value(
        "kv_windows_rebuilt",
        "Requests that computed windows again where full layers were cached, because no snapshot was nearer.",
        lambda s: s.kv.windows_rebuilt,
    ),
    _Value("kv_blocks_stored", "Blocks added to the prefix tree.", lambda s: s.kv.blocks_stored),
    _Value("kv_blocks_removed", "Blocks removed from the prefix tree.", lambda s: s.kv.blocks_removed),
    _Value("batch_splits", "Batches that the backend had to split.", lambda s: s.batch_splits),
    _Value("engine_steps", "Steps of the engine.", lambda s: s.steps),
    _Value("backend_rebuilds", "Times the backend's context was rebuilt.", lambda s: s.rebuilds),
    _Value(
        "position_mismatches", "Sequences whose position in the backend was wrong.", lambda s: s.position_mismatches
    ),
)


class EngineCollector(Collector):
    """All metrics of one engine, labelled with the model's name as in vLLM."""

    def __init__(
        self,
        prefix: str,
        model_name: Callable[[], str],
        snapshot: Callable[[], EngineSnapshot | None],
        observer: MetricsObserver,
        store: object = None,
    ) -> None:
        """`store`: the same for engines that share K/V on disk."""
        self.store = store
        self._prefix = prefix
        self._model_name = model_name
        self.snapshot = snapshot
        self._observer = observer

    def describe(self) -> list[Metric]:
        """Empty, so that registering takes no snapshot of an engine that has not started."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self.of_model()
        yield from _of_stores(self._prefix, [self])

    def of_model(self) -> Iterator[Metric]:
        snapshot = self.snapshot()
        if snapshot is None:
            return
        model = self._model_name()
        for value in _GAUGES:
            yield self._fill(GaugeMetricFamily(*self._naming(value)), value, model, snapshot)
        for value in _COUNTERS:
            yield self._fill(CounterMetricFamily(*self._naming(value)), value, model, snapshot)
        for name, histogram in self._observer.histograms.items():
            family = HistogramMetricFamily(f"{self._prefix}:{name}", histogram.help, labels=["model_name"])
            family.add_metric([model], histogram.buckets(), histogram.sum)
            yield family

    def _naming(self, value: _Value) -> tuple[str, str, None, list[str]]:
        return f"{self._prefix}:{value.name}", value.help, None, ["model_name", *value.labels]

    def _fill(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: _Value, model: str, snapshot: EngineSnapshot
    ) -> Metric:
        current = value.value(snapshot)
        if isinstance(current, Mapping):
            for place, number in current.items():
                family.add_metric([model, *((place,) if isinstance(place, str) else place)], number)
        else:
            family.add_metric([model], current)
        return family


def _of_stores(prefix: str, engines: Sequence[EngineCollector]) -> Iterator[Metric]:
    """The sum over all directories, each counted once."""
    found = {engine.store: snapshot for engine in engines if (snapshot := engine.snapshot()) is not None}
    for name, text, value in _STORE_GAUGES:
        if found:
            yield GaugeMetricFamily(f"{prefix}:{name}", text, sum(map(value, found.values())))


class ModelsCollector(Collector):
    """The metrics of several engines, loaded or not, and of the memory they share."""

    def __init__(
        self,
        prefix: str,
        engines: Sequence[EngineCollector],
        account_status: Callable[[], list[AccountStatus]],
        budgets: Mapping[str, int],
    ) -> None:
        """`budgets` by device."""
        self._prefix = prefix
        self._engines = engines
        self._account_status = account_status
        self._budgets = budgets

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for engine in self._engines:
            for family in engine.of_model():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()
        yield from _of_stores(self._prefix, self._engines)
        budget = GaugeMetricFamily(
            f"{self._prefix}:memory_budget_bytes", "Memory limit for all models on a device.", labels=["device"]
        )
        for device, size in self._budgets.items():
            budget.add_metric([device], size)
        yield budget
        memory = GaugeMetricFamily(
            f"{self._prefix}:model_memory_bytes", "Memory used by a loaded model.", labels=["model_name", "kind"]
        )
        for status in self._account_status():
            memory.add_metric([status.name, "fixed"], status.fixed)
            memory.add_metric([status.name, "kv"], status.kv)
        yield memory


class WorkCollector(Collector):
    """The metrics of worker processes."""

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


def create_registry(collector: Collector) -> CollectorRegistry:
    """A registry per server, with the engine's metrics and the process's (memory, CPU, files)."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry
