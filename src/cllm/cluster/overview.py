"""What `cllm cluster status` shows: what Ray knows of nodes and replicas, and what an ingress knows of their work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cllm.cluster.remote import RemoteExecutor
    from cllm.engine.stats import EngineSnapshot

ASK_S = 10.0
"""How long to wait for an ingress."""


class SeenReplica(NamedTuple):
    """As an ingress sees it."""

    running: int
    waiting: int
    kv_use: float
    """The share of its KV memory that running requests hold."""
    hit_rate: float | None
    """The share of prompt tokens that came from the cache. None: there were no prompts."""


class SeenModel(NamedTuple):
    name: str
    backend: str
    replicas: dict[str, SeenReplica]


class Seen(NamedTuple):
    url: str | None
    """None: requests come through Ray Serve's proxy."""
    models: dict[str, SeenModel]
    """By deployment."""


def seen_model(executor: RemoteExecutor, name: str) -> SeenModel:
    assert executor.text is not None
    reports = {peer.name: peer.report for peer in executor.peers}
    replicas = {id: seen_replica(report.snapshot) for id, report in reports.items() if report is not None}
    return SeenModel(name, executor.text.facts.traits.name, replicas)


def seen_replica(snapshot: EngineSnapshot) -> SeenReplica:
    prompts = snapshot.prompt_tokens
    rate = snapshot.cached_tokens / prompts if prompts else None
    return SeenReplica(snapshot.running, snapshot.waiting, snapshot.kv.used_fraction, rate)


@dataclass(frozen=True)
class ClusterNode:
    host: str
    is_head: bool
    cpus: float
    gpus: float


@dataclass(frozen=True)
class ReplicaRow:
    id: str
    state: str
    host: str | None
    pid: int | None
    seen: SeenReplica | None


@dataclass(frozen=True)
class DeploymentRow:
    """The replicas of a model, or the ingresses."""

    name: str
    state: str
    message: str
    wanted: int
    model: str | None
    backend: str | None
    replicas: list[ReplicaRow]


@dataclass(frozen=True)
class Overview:
    address: str
    state: str
    """Ray Serve's, of the whole."""
    url: str | None
    nodes: list[ClusterNode]
    deployments: list[DeploymentRow]


def overview(address: str) -> Overview | None:
    """The state of the cluster that this process is connected to. None: cLLM is not deployed there."""
    from ray.serve.context import _get_global_client

    from cllm.cluster.application import APPLICATION

    client = _get_global_client(raise_if_no_controller_running=False)
    details = None if client is None else client.get_serve_details()["applications"].get(APPLICATION)
    if details is None:
        return None
    seen = _ask_ingress(APPLICATION)
    rows = [_deployment(name, each, seen) for name, each in sorted(details["deployments"].items())]
    return Overview(address, _text(details["status"]), None if seen is None else seen.url, _nodes(), rows)


def _ask_ingress(application: str) -> Seen | None:
    """None: there is none that answers."""
    from ray import serve

    from cllm.cluster.models import INGRESS

    try:
        handle = serve.get_deployment_handle(INGRESS, application)
        seen: Seen = handle.seen.remote().result(timeout_s=ASK_S)
    except Exception:  # of many classes; what Ray knows is shown all the same
        return None
    return seen


def _nodes() -> list[ClusterNode]:
    from cllm.cluster.ray_node import nodes

    return [
        ClusterNode(
            node["NodeManagerAddress"],
            "node:__internal_head__" in node["Resources"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in nodes()
    ]


def _deployment(name: str, details: dict[str, Any], seen: Seen | None) -> DeploymentRow:
    model = None if seen is None else seen.models.get(name)
    known = {} if model is None else model.replicas
    rows = [
        ReplicaRow(
            each["replica_id"],
            _text(each["state"]),
            each.get("node_ip"),
            each.get("pid"),
            known.get(each["replica_id"]),
        )
        for each in details["replicas"]
    ]
    return DeploymentRow(
        name,
        _text(details["status"]),
        details.get("message") or "",
        details["target_num_replicas"],
        None if model is None else model.name,
        None if model is None else model.backend,
        rows,
    )


def _text(value: Any) -> str:
    return str(getattr(value, "value", value)).lower()
