"""What the page shows of a cluster: the requests of this ingress, and a line for each replica. It has no map of memory:
each replica has memory of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cllm.cluster.totals import ReplicaStatus
from cllm.engine.request import Request
from cllm.engine.stats import INTERVAL_S, LONGEST_S, MOST_REQUESTS, EngineView, view_of
from cllm.kv.usage import KVUsage
from cllm.kv.view import KVView


class ViewSource:
    """Makes views when they are asked for; the same one again for a while."""

    def __init__(self) -> None:
        self._latest: EngineView | None = None
        self._next_at = 0.0

    def view(self, requests: Sequence[Request], usage: KVUsage) -> EngineView:
        now = time.monotonic()
        if self._latest is None or now >= self._next_at:
            number = 1 if self._latest is None else self._latest.number + 1
            shown = tuple(view_of(request, now) for request in requests[:MOST_REQUESTS])
            self._latest = EngineView(number, _without_cells(usage), shown, len(requests))
            self._next_at = now + (INTERVAL_S if requests else LONGEST_S)
        return self._latest


def _without_cells(usage: KVUsage) -> KVView:
    return KVView(
        layout="slots" if usage.layout == "slots" else "paged",
        cell_tokens=usage.unit_tokens,
        cell_bytes=usage.bytes_per_unit,
        holders=np.zeros(0, np.int32),
        resident=np.zeros(0, np.bool_),
        extent_cells=1,
        prefixes=(),
        prefixes_in_all=0,
        used_prefixes=frozenset(),
        sequences=(),
    )


def replica_line(replica: ReplicaStatus) -> dict[str, Any]:
    """A row of the page's table of replicas; without numbers while there is no report."""
    line: dict[str, Any] = {"name": replica.name, "node": replica.node, "state": replica.state}
    if replica.report is None:
        return line
    snapshot = replica.report.snapshot
    usage = snapshot.kv
    return {
        **line,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "used_bytes": usage.referenced * usage.bytes_per_unit,
        "cached_bytes": usage.evictable * usage.bytes_per_unit,
        "total_bytes": usage.total * usage.bytes_per_unit,
        "hit_tokens": usage.hit_tokens,
        "query_tokens": usage.query_tokens,
        "generated_tokens": snapshot.generated_tokens,
        "uptime_s": round(snapshot.uptime_s, 2),
    }
