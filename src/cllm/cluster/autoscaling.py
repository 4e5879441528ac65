"""How many replicas a model needs, for Ray Serve's autoscaler.

Ray Serve runs this in its controller, and pickles this module by value to get it there: it imports nothing of cLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

KV_USE = "kv_use"
"""The name of the figure that replicas report: the share of their KV memory that running requests hold."""

SLACK = 0.8
"""Replicas are removed only if the others then stay below this share of their targets. Otherwise a load between the two
would add and remove one again and again."""

_ROUNDING = 1e-9
"""Sums of shares may miss a whole number by this much."""


@dataclass(frozen=True)
class Targets:
    """For one replica."""

    requests: float
    kv_use: float


def desired_replicas(current: int, requests: float, kv_uses: Iterable[float], targets: Targets) -> int:
    """As few as keep each replica within its targets, at least one, if the load is spread evenly. `requests`: running
    and waiting, of all replicas. `kv_uses`: one figure of each replica."""
    load = max(requests / targets.requests, math.fsum(kv_uses) / targets.kv_use)
    needed = max(1, math.ceil(load - _ROUNDING))
    if needed >= current:
        return needed
    return min(current, max(1, math.ceil(load / SLACK - _ROUNDING)))


class QueueAndKVPolicy:
    """A policy of Ray Serve, which adds bounds and delays of its own."""

    def __init__(self, target_requests: float, target_kv_use: float) -> None:
        self._targets = Targets(target_requests, target_kv_use)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context`: Ray's `AutoscalingContext`, whose figures are means over a while."""
        reported: Mapping[Any, float] = (context.aggregated_metrics or {}).get(KV_USE, {})
        current: int = context.target_num_replicas
        return desired_replicas(current, context.total_num_requests, reported.values(), self._targets), {}
