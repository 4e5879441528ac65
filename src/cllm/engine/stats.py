"""The engine's numbers, published as one immutable value after every step: readers never wait, nothing is torn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
    """Computed tokens that rolling windows have let go of."""
    finished: Mapping[str, int]
    """Finish reason -> requests."""
    uptime_s: float
    last_step_s: float
    step_token_budget: int
