"""A cluster as a whole: the sum of what its replicas report.

Replicas of a model have the same settings, so a unit of one is a unit of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from cllm.cluster.messages import Report
from cllm.engine.stats import EngineSnapshot
from cllm.kv.usage import DiskNumbers, GroupUsage, HostNumbers, KVUsage

ReplicaState = Literal["running", "silent", "joining", "draining"]
"""`silent`: it has told nothing of its cache for a while; `joining`: there is no report of it yet; `draining`: it
finishes what it has and gets nothing more."""


class ReplicaStatus(NamedTuple):
    name: str
    node: str
    """The address of its machine."""
    pid: int | None
    state: ReplicaState
    report: Report | None
    """The latest."""


_AS_THEY_ARE = ("layout", "unit_tokens", "bytes_per_unit", "extent_bytes")
_SHARED_ON_A_NODE = ("bytes", "limit_bytes")
"""Numbers of a directory on disk, which the replicas of a machine have in common."""


def total_snapshot(replicas: Sequence[tuple[str, EngineSnapshot]]) -> EngineSnapshot:
    """The snapshot of at least one replica together. Each comes with the machine it is on."""
    snapshots = [snapshot for _, snapshot in replicas]
    finished: Counter[str] = Counter()
    for snapshot in snapshots:
        finished.update(snapshot.finished)
    special: dict[str, Any] = {
        "kv": total_usage([(node, snapshot.kv) for node, snapshot in replicas]),
        "finished": dict(finished),
        "uptime_s": max(snapshot.uptime_s for snapshot in snapshots),
        "last_step_s": max(snapshot.last_step_s for snapshot in snapshots),
    }
    return EngineSnapshot(**special, **_sums(snapshots, without=special))


def total_usage(replicas: Sequence[tuple[str, KVUsage]]) -> KVUsage:
    """The usage of at least one replica together. Each comes with the machine it is on."""
    usages = [usage for _, usage in replicas]
    special: dict[str, Any] = {
        **{name: getattr(usages[0], name) for name in _AS_THEY_ARE},
        "largest_free_span": max(usage.largest_free_span for usage in usages),
        "contiguity": _mean((usage.contiguity, usage.referenced) for usage in usages),
        "disk": _total_disk([(node, usage.disk) for node, usage in replicas]),
        "host": HostNumbers(**_sums([usage.host for usage in usages])),
        "groups": tuple(map(_total_group, zip(*(usage.groups for usage in usages), strict=True))),
    }
    return KVUsage(**special, **_sums(usages, without=special))


def total_details(replicas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Pins and the disk of all replicas; what each holds is in its own details."""
    return {
        "disk": _disk_details({name: found for name, each in replicas.items() if (found := each.get("disk"))}),
        "pins": _pin_details({name: found for name, each in replicas.items() if (found := each.get("pins"))}),
    }


def _sums(numbers: Sequence[Any], without: Iterable[str] = ()) -> dict[str, Any]:
    """The sums of the fields of equal named tuples."""
    left_out = set(without)
    fields = [name for name in numbers[0]._fields if name not in left_out]
    return {name: sum(getattr(each, name) for each in numbers) for name in fields}


def _mean(weighted: Iterable[tuple[float, int]]) -> float:
    """1 where nothing has any weight."""
    pairs = list(weighted)
    weight = sum(weight for _, weight in pairs)
    return sum(value * part for value, part in pairs) / weight if weight else 1.0


def _total_group(replicas: Sequence[GroupUsage]) -> GroupUsage:
    return replicas[0]._replace(**_sums(replicas, without=("kind", "block_bytes")))


def _total_disk(replicas: Sequence[tuple[str, DiskNumbers]]) -> DiskNumbers:
    a_node = list(dict(replicas).values())
    shared = {name: sum(getattr(each, name) for each in a_node) for name in _SHARED_ON_A_NODE}
    return DiskNumbers(**shared, **_sums([disk for _, disk in replicas], without=shared))


def _disk_details(replicas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    if not replicas:
        return None
    counts: Counter[str] = Counter()
    for each in replicas.values():
        counts.update(each["counts"])
    troubles = [f"{name}: {trouble}" for name, each in replicas.items() if (trouble := each.get("trouble"))]
    directory = next(iter(replicas.values()))["directory"]
    return {"directory": directory, "counts": dict(counts), "trouble": "; ".join(troubles) or None}


def _pin_details(replicas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """A prefix that is pinned on several replicas is one line, with all of them."""
    if not replicas:
        return None
    numbers = ("limit_bytes", "pinned_bytes", "refused", "expired", "gave_way")
    lines: dict[str, dict[str, Any]] = {}
    for name, each in replicas.items():
        for line in each["prefixes"]:
            lines[line["id"]] = _joined(lines.get(line["id"]), line, name)
    return {
        **{number: sum(each[number] for each in replicas.values()) for number in numbers},
        "prefixes": list(lines.values()),
    }


def _joined(before: dict[str, Any] | None, line: Mapping[str, Any], replica: str) -> dict[str, Any]:
    """A pin on one more replica. The ids of prefixes differ from replica to replica, so there is none."""
    if before is None:
        return {**line, "prefix": None, "replicas": [replica]}
    ends = (before["until"], line["until"])
    return {
        **before,
        "state": "pinned" if "pinned" in (before["state"], line["state"]) else line["state"],
        "bytes": before["bytes"] + line["bytes"],
        "uses": before["uses"] + line["uses"],
        "since": min(before["since"], line["since"]),
        "until": None if None in ends else max(ends),
        "replicas": [*before["replicas"], replica],
    }
