"""What one simulation gave, as plain figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cllm_bench.simulate.server import SimulatedServer
from cllm_bench.simulate.settings import Settings, Value
from cllm_bench.simulate.tally import Sample, Tally, percentile

PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, eq=False)
class Result:
    settings: Settings
    varied: Mapping[str, Value]
    """The settings that differ between the results of a sweep."""
    trace: str
    cost: str
    figures: dict[str, float]
    samples: Sequence[Sample]
    interrupted: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "varied": dict(self.varied),
            "trace": self.trace,
            "cost": self.cost,
            "interrupted": self.interrupted,
            "figures": self.figures,
            "memory": [sample._asdict() for sample in self.samples],
        }


def traces_of(results: Sequence[Result]) -> str:
    """What was simulated; a sweep of rates or replicas may have more than one trace."""
    first, last = results[0].trace, results[-1].trace
    return first if first == last else f"{first} to {last}"


def figures_of(
    tally: Tally, servers: Sequence[SimulatedServer], *, arrived: int, never_sent: int, wall_s: float
) -> dict[str, float]:
    """`never_sent` are requests that follow others which did not end well."""
    usages = [server.kv.usage() for server in servers]
    prompt_tokens = sum(server.scheduler.requests.prompt_tokens for server in servers)
    cached_tokens = sum(server.scheduler.requests.cached_tokens for server in servers)
    computed = [_computed_tokens(server) for server in servers]
    duration = tally.last_end - tally.first_arrival if tally.ended else 0.0
    figures: dict[str, float] = {
        "requests": arrived + never_sent,
        "completed": tally.ends["length"],
        "timed_out": tally.ends["timeout"],
        "failed": tally.ends["error"],
        "too_large": tally.too_large,
        "turned_away": tally.turned_away,
        "never_sent": never_sent,
        "preemptions": sum(server.scheduler.requests.preemptions for server in servers),
        "evicted_tokens": sum(usage.evictions * usage.unit_tokens for usage in usages),
        "stored_blocks": sum(usage.blocks_stored for usage in usages),
        "removed_blocks": sum(usage.blocks_removed for usage in usages),
        "hit_rate": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "prompts_s": tally.prompts_s,
        "saved_s": tally.saved_s,
        "balance": max(computed) * len(servers) / sum(computed) if sum(computed) else 1.0,
        "peak_memory": max(usage.peak / usage.total for usage in usages),
        "duration_s": duration,
        "requests_per_s": tally.ends["length"] / duration if duration else 0.0,
        "answer_tokens": tally.answer_tokens,
        "answer_tokens_per_s": tally.answer_tokens / duration if duration else 0.0,
        "steps": tally.steps,
        "computed_tokens": tally.computed_tokens,
        "wall_s": wall_s,
        "simulated_tokens_per_wall_s": tally.computed_tokens / wall_s if wall_s else 0.0,
    }
    for name, share in PERCENTILES.items():
        figures[f"ttft_{name}_s"] = percentile(tally.ttft, share)
        figures[f"token_gap_{name}_s"] = tally.gap_percentile(share)
        figures[f"total_{name}_s"] = percentile(tally.total, share)
    return figures


def _computed_tokens(server: SimulatedServer) -> int:
    scheduler = server.scheduler
    return scheduler.requests.prompt_tokens - scheduler.requests.cached_tokens + scheduler.requests.generated_tokens
