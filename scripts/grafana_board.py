"""Write the Grafana board, for one server and for a cluster: choose models and replicas with its variables.

python scripts/grafana_board.py FILE
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
HEIGHT = 8
PER_ROW = 3

TOKENS_PER_S = "suffix: tok/s"
TOKENS = "suffix: tok"
PER_S = "ops"
REQUESTS_PER_S = "reqps"
SECONDS = "s"
BYTES = "bytes"
BYTES_PER_S = "Bps"
SHARE = "percentunit"
COUNT = "short"


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    description: str
    queries: Sequence[tuple[str, str]]
    """What the legend says, and PromQL."""
    stacked: bool = False
    maximum: float | None = None


EACH = "{{model_name}} {{replica}}"
BY = "model_name, replica"


def of(name: str) -> str:
    """A metric of the engine, with the labels that the variables choose. A server alone has no replica: `.*` fits."""
    return f'cllm:{name}{{model_name=~"$model_name", replica=~"$replica"}}'


def rate_of(name: str) -> str:
    return rate(of(name))


def quantiles_of(name: str, *levels: float) -> list[tuple[str, str]]:
    return quantiles(of(f"{name}_bucket"), *levels)


def rate(selector: str) -> str:
    return f"rate({selector}[$__rate_interval])"


def total(expression: str, by: str = "") -> str:
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def share(part: str, whole: str, by: str = "") -> str:
    """Of two rates. Without traffic there is no value, instead of a division by zero."""
    return f"{total(part, by)} / ({total(whole, by)} > 0)"


def quantiles(buckets: str, *levels: float) -> list[tuple[str, str]]:
    summed = f"sum by (le) ({rate(buckets)})"
    return [(f"P{level * 100:g}", f"histogram_quantile({level:g}, {summed})") for level in levels]


# -- rows ------------------------------------------------------------------------------------------------------------


def traffic() -> Iterator[Panel]:
    yield Panel(
        "Finished requests",
        REQUESTS_PER_S,
        "Requests that ended, by reason. length: max_tokens or the context was reached.",
        [("{{finished_reason}}", total(rate_of("request_success_total"), "finished_reason"))],
        stacked=True,
    )
    yield Panel(
        "Running and waiting",
        COUNT,
        "Requests being computed, and requests in the queue. If the queue stays long, the server is too small.",
        [("running", total(of("num_requests_running"))), ("waiting", total(of("num_requests_waiting")))],
    )
    yield Panel(
        "Tokens",
        TOKENS_PER_S,
        "Prompt tokens, those of them that came from the KV cache, and generated tokens.",
        [
            ("prompt", total(rate_of("prompt_tokens_total"))),
            ("prompt, cached", total(rate_of("prompt_tokens_cached_total"))),
            ("generated", total(rate_of("generation_tokens_total"))),
        ],
    )


def connections() -> Iterator[Panel]:
    yield Panel("HTTP connections", COUNT, "Open connections.", [("open", total("cllm:http_connections"))])
    yield Panel(
        "Connections ended by the server",
        PER_S,
        "Connections that the server ended to protect itself: shed or refused at its limits, stalled or crowded out.",
        [("{{reason}}", total(rate("cllm:http_connections_cut_total"), "reason"))],
    )
    yield Panel(
        "Process memory",
        BYTES,
        "Resident memory of the server's process. Weights mapped from a file count as far as they are resident.",
        [("resident", total("process_resident_memory_bytes"))],
    )


def latency() -> Iterator[Panel]:
    yield Panel(
        "Time to first token",
        SECONDS,
        "From a request's arrival to its first token, including the queue.",
        quantiles_of("time_to_first_token_seconds", 0.5, 0.9, 0.99),
    )
    yield Panel(
        "Time between tokens",
        SECONDS,
        "Between two tokens of an answer. scheduler.max_gap_ms limits P99.",
        quantiles_of("inter_token_latency_seconds", 0.5, 0.9, 0.99),
    )
    yield Panel(
        "Whole request",
        SECONDS,
        "From a request's arrival to its end.",
        quantiles_of("e2e_request_latency_seconds", 0.5, 0.9, 0.99),
    )
    yield Panel(
        "Queue", SECONDS, "Waiting for the first step.", quantiles_of("request_queue_time_seconds", 0.5, 0.9, 0.99)
    )
    yield Panel(
        "Prefill",
        SECONDS,
        "Computing the prompt: from the first step to the first token.",
        quantiles_of("request_prefill_time_seconds", 0.5, 0.9, 0.99),
    )
    yield Panel(
        "Decode",
        SECONDS,
        "From the first token to the last.",
        quantiles_of("request_decode_time_seconds", 0.5, 0.9, 0.99),
    )


def cache() -> Iterator[Panel]:
    yield Panel(
        "KV cache in use",
        SHARE,
        "Share of the KV cache that running requests and pins hold. Near 100 %, requests wait or are preempted.",
        [(EACH, f"max by ({BY}) ({of('kv_cache_usage_perc')})")],
        maximum=1,
    )
    yield Panel(
        "Hit rate",
        SHARE,
        "Share of the prompt tokens that were found in the KV cache.",
        [(EACH, share(rate_of("prefix_cache_hits_total"), rate_of("prefix_cache_queries_total"), BY))],
        maximum=1,
    )
    yield Panel(
        "KV memory",
        BYTES,
        "referenced: held by running requests; evictable: cached prefixes; free: the rest of the limit.",
        [("{{state}}", total(of("kv_bytes"), "state"))],
        stacked=True,
    )
    yield Panel(
        "Evictions",
        PER_S,
        "Blocks (cells on llama.cpp) evicted from the KV cache. Many, and a falling hit rate: the cache is too small.",
        [(EACH, total(rate_of("kv_evictions_total"), BY))],
    )
    yield Panel(
        "Groups of layers",
        BYTES,
        "KV memory of layers that keep all tokens (full), a window, or a state, in use and only cached.",
        [("{{group}} {{state}}", total(of("kv_group_bytes"), "group, state"))],
    )
    yield Panel(
        "Waits for memory",
        PER_S,
        "Waits and preemptions for lack of KV memory.",
        [(EACH, total(rate_of("kv_allocation_failures_total"), BY))],
    )
    yield Panel(
        "Pinned",
        BYTES,
        "KV memory of pinned prefixes; they are never evicted.",
        [(EACH, total(of("kv_pinned_bytes"), BY))],
    )


def tiers() -> Iterator[Panel]:
    yield Panel(
        "K/V in host memory and on disk",
        BYTES,
        "Host memory: evicted from the GPU. Disk: of all models and servers that share the directory.",
        [
            ("host", total(of("kv_host_bytes"))),
            ("host, limit", total(of("kv_host_limit_bytes"))),
            ("disk", "max(cllm:kv_disk_bytes)"),
            ("disk, limit", "max(cllm:kv_disk_limit_bytes)"),
        ],
    )
    yield Panel(
        "Prompt tokens from tiers",
        TOKENS_PER_S,
        "Prompt tokens whose K/V were loaded from host memory or disk instead of being computed.",
        [("host", total(rate_of("kv_host_hits_total"))), ("disk", total(rate_of("kv_disk_hits_total")))],
    )
    yield Panel(
        "Moved between tiers",
        BYTES_PER_S,
        "K/V written to and read from disk, and copied to and from host memory.",
        [
            ("to disk", total(rate_of("kv_disk_written_bytes_total"))),
            ("from disk", total(rate_of("kv_disk_read_bytes_total"))),
            ("to host", total(rate_of("kv_host_out_bytes_total"))),
            ("from host", total(rate_of("kv_host_in_bytes_total"))),
        ],
    )
    yield Panel(
        "Incomplete loads",
        PER_S,
        "Loads that brought less than expected; the rest of the prompt was computed.",
        [
            ("host", total(rate_of("kv_host_load_failures_total"))),
            ("disk", total(rate_of("kv_disk_load_failures_total"))),
        ],
    )


def engine() -> Iterator[Panel]:
    yield Panel("Steps", PER_S, "Steps of the engine.", [(EACH, total(rate_of("engine_steps_total"), BY))])
    yield Panel(
        "Step time", SECONDS, "Duration of an engine step.", quantiles_of("engine_step_seconds", 0.5, 0.9, 0.99)
    )
    yield Panel(
        "Tokens per step",
        TOKENS,
        "Tokens computed per step, on average, and the budget of the next step for prompts.",
        [
            ("computed", share(rate_of("iteration_tokens_total_sum"), rate_of("iteration_tokens_total_count"))),
            ("budget", f"avg({of('step_token_budget')})"),
        ],
    )
    yield Panel(
        "Preemptions",
        PER_S,
        "Requests whose memory went to others; they are computed again.",
        [(EACH, total(rate_of("num_preemptions_total"), BY))],
    )
    yield Panel(
        "Drafted tokens",
        TOKENS_PER_S,
        "Drafted tokens that were verified, and those that became part of answers.",
        [
            ("drafted", total(rate_of("spec_decode_num_draft_tokens_total"))),
            ("accepted", total(rate_of("spec_decode_num_accepted_tokens_total"))),
        ],
    )
    yield Panel(
        "Faults",
        PER_S,
        "Rebuilds of the backend's context, wrong positions in it, and failed upkeep of KV memory. All should be 0.",
        [
            ("rebuilds", total(rate_of("backend_rebuilds_total"))),
            ("wrong positions", total(rate_of("position_mismatches_total"))),
            ("upkeep", total(rate_of("kv_upkeep_failures_total"))),
        ],
    )


def tenants() -> Iterator[Panel]:
    yield Panel(
        "Requests by key",
        REQUESTS_PER_S,
        "Requests that ended, by API key. Needs server.api_keys, like everything in this row.",
        [("{{key}}", total(rate("cllm:key_requests_total"), "key"))],
    )
    yield Panel(
        "Running by key",
        COUNT,
        "Requests that each key has open.",
        [("{{key}}", total("cllm:key_requests_running", "key"))],
    )
    yield Panel(
        "Refused by key",
        REQUESTS_PER_S,
        "Requests over a key's limit (max_concurrent).",
        [("{{key}}", total(rate("cllm:key_requests_refused_total"), "key"))],
    )
    yield Panel(
        "Prompt tokens by key",
        TOKENS_PER_S,
        "Prompt tokens, cached ones included.",
        [("{{key}}", total(rate("cllm:key_prompt_tokens_total"), "key"))],
    )
    yield Panel(
        "Hit rate by key",
        SHARE,
        "Share of a key's prompt tokens that came from the KV cache.",
        [
            (
                "{{key}}",
                share(rate("cllm:key_prompt_tokens_cached_total"), rate("cllm:key_prompt_tokens_total"), "key"),
            )
        ],
        maximum=1,
    )
    yield Panel(
        "Generated tokens by key",
        TOKENS_PER_S,
        "Tokens generated for each key.",
        [("{{key}}", total(rate("cllm:key_generation_tokens_total"), "key"))],
    )


def routing() -> Iterator[Panel]:
    yield Panel(
        "Replicas",
        COUNT,
        "Replicas by state. silent: no cache events for a while, so requests are sent there by load alone.",
        [("{{state}}", "max by (state) (cllm_replicas)")],
    )
    yield Panel(
        "Requests by replica",
        REQUESTS_PER_S,
        "Requests sent to each replica.",
        [("{{replica}}", total(rate('cllm_router_requests_total{replica=~"$replica"}'), "replica"))],
        stacked=True,
    )
    yield Panel("Open streams", COUNT, "Streams of all ingresses.", [("open", total("cllm_ingress_streams"))])
    yield Panel(
        "Expected and real hit rate",
        SHARE,
        "Share of the prompt tokens that the router expected in the chosen replica's cache, and that were there. "
        "A gap means that its index is behind.",
        [
            (
                "expected",
                share(rate("cllm_router_expected_hit_tokens_total"), rate("cllm_router_prompt_tokens_total")),
            ),
            ("real", share(rate_of("prefix_cache_hits_total"), rate_of("prefix_cache_queries_total"))),
        ],
        maximum=1,
    )
    yield Panel(
        "Saved requests",
        REQUESTS_PER_S,
        "After a replica failed or drained: requests sent again before a token, and streams resumed elsewhere.",
        [
            ("sent again: {{reason}}", total(rate("cllm_router_retries_total"), "reason")),
            ("resumed", total(rate("cllm_router_resumed_streams_total"))),
        ],
    )
    yield Panel(
        "Lost requests",
        REQUESTS_PER_S,
        "Requests that ended with an error because no replica could finish them. Should be 0.",
        [("failed", total(rate("cllm_router_failed_requests_total")))],
    )
    yield Panel(
        "Time to choose a replica",
        SECONDS,
        "Duration of a routing decision.",
        quantiles("cllm_router_decision_seconds_bucket", 0.5, 0.99),
    )
    yield Panel(
        "Index",
        COUNT,
        "Cached blocks that a router knows, over all replicas. Every ingress has an index of its own.",
        [("blocks", "max(cllm_router_index_blocks)")],
    )
    yield Panel(
        "Balance",
        COUNT,
        "Running requests of the busiest replica, relative to the mean. 1: evenly spread.",
        [
            (
                "busiest / mean",
                f"max({total(of('num_requests_running'), 'replica')}) / "
                f"(avg({total(of('num_requests_running'), 'replica')}) > 0)",
            )
        ],
    )


def replicas() -> Iterator[Panel]:
    yield Panel(
        "Running by replica",
        COUNT,
        "Requests being computed.",
        [("{{replica}}", total(of("num_requests_running"), "replica"))],
    )
    yield Panel(
        "Waiting by replica",
        COUNT,
        "Requests in the queue.",
        [("{{replica}}", total(of("num_requests_waiting"), "replica"))],
    )
    yield Panel(
        "Time to first token by replica",
        SECONDS,
        "P99, from a request's arrival at the replica.",
        [
            (
                "{{replica}}",
                f"histogram_quantile(0.99, sum by (le, replica) ({rate_of('time_to_first_token_seconds_bucket')}))",
            )
        ],
    )


# -- the board ------------------------------------------------------------------------------------------------------


def board() -> dict[str, Any]:
    rows = {
        "Traffic": [*traffic(), *connections()],
        "Latency": [*latency()],
        "KV cache": [*cache(), *tiers()],
        "Engine": [*engine()],
        "Tenants": [*tenants()],
        "Cluster": [*routing(), *replicas()],
    }
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }
    models = variable("model_name", "Model", "label_values(cllm:num_requests_running, model_name)")
    replica = variable(
        "replica", "Replica", 'label_values(cllm:num_requests_running{model_name=~"$model_name"}, replica)'
    )
    return {
        "uid": "cllm",
        "title": "cLLM",
        "description": "A cLLM server or cluster: traffic, latency, KV cache, engine, API keys, router and replicas.",
        "tags": ["cllm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, models, replica]},
        "panels": list(laid_out(rows)),
    }


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A choice of label values; all of them by default."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def laid_out(rows: dict[str, list[Panel]]) -> Iterator[dict[str, Any]]:
    """A heading for each row, and below it its panels, three abreast."""
    number, y = 1, 0
    for title, panels in rows.items():
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}
        number, y = number + 1, y + 1
        width = WIDTH // PER_ROW
        for index, panel in enumerate(panels):
            line, column = divmod(index, PER_ROW)
            place = {"x": column * width, "y": y + line * HEIGHT, "w": width, "h": HEIGHT}
            yield time_series(panel, number, place)
            number += 1
        y += -(-len(panels) // PER_ROW) * HEIGHT


def time_series(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "custom": {
            "fillOpacity": 30 if panel.stacked else 10,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        },
    }
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the board goes")
    file: Path = parser.parse_args().file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(board(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
