"""The engine's statistics, published as one immutable value after every step, so that readers never wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cllm.backends.base import Backend
from cllm.engine.scheduler import Scheduler
from cllm.kv.usage import KVUsage


class EngineSnapshot(NamedTuple):
    kv: KVUsage
    running: int
    waiting: int
    steps: int
    preemptions: int
    rebuilds: int
    position_mismatches: int
    batch_splits: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    dropped_tokens: int
    """Computed tokens that rolling windows dropped."""
    drafted_tokens: int
    """Drafted tokens that were computed."""
    accepted_drafts: int
    """Drafted tokens that became tokens of answers."""
    finished: Mapping[str, int]
    """Finish reason -> requests."""
    uptime_s: float
    last_step_s: float
    step_token_budget: int


def take_snapshot(
    scheduler: Scheduler, backend: Backend, *, steps: int, rebuilds: int, uptime_s: float, last_step_s: float
) -> EngineSnapshot:
    return EngineSnapshot(
        kv=scheduler.kv.usage(),
        running=len(scheduler.requests.running),
        waiting=len(scheduler.requests.waiting),
        steps=steps,
        preemptions=scheduler.requests.preemptions,
        rebuilds=rebuilds,
        position_mismatches=scheduler.faults.position_mismatches,
        batch_splits=backend.batch_splits,
        prompt_tokens=scheduler.requests.prompt_tokens,
        cached_tokens=scheduler.requests.cached_tokens,
        generated_tokens=scheduler.requests.generated_tokens,
        dropped_tokens=scheduler.kv.dropped_tokens,
        drafted_tokens=scheduler.requests.drafted_tokens,
        accepted_drafts=scheduler.requests.accepted_drafts,
        finished=dict(scheduler.requests.finished),
        uptime_s=uptime_s,
        last_step_s=last_step_s,
        step_token_budget=scheduler.budget.chunk_tokens(len(scheduler.requests.running)),
    )
