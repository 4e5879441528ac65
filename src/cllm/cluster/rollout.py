"""Deploying the application to a Ray cluster, and removing it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import ray
from ray import serve
from ray.serve.schema import ApplicationStatusOverview

from cllm.cluster.application import APPLICATION, ON_HEAD, build_application, serve_logging
from cllm.cluster.models import INGRESS, ClusterModel, cluster_models
from cllm.cluster.ray_node import ClusterError, nodes
from cllm.config import Config
from cllm.errors import CLLMError, ConfigError

POLL_S = 0.25
_MIB = 1 << 20
_ROUNDING = 1e-6
_OWN_ERROR = re.compile(r"^cllm\.[\w.]*: (.+)$", re.MULTILINE)
_ANY_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)(?:\(\w+\))?: (.+)$", re.MULTILINE)


class RolloutProgress(NamedTuple):
    """Replicas of all models: those that are ready, and those that shall be."""

    ready: int
    wanted: int


def is_deployed() -> bool:
    return _overview() is not None


def deploy(config: Config, on_progress: Callable[[RolloutProgress], None]) -> None:
    """Deploy, or update what is deployed, and wait until it is done. Raises `ConfigError` or `ClusterError`."""
    models = cluster_models(config)
    check_room(models)
    application = build_application(config, listens=True)
    serve.start(proxy_location="Disabled", logging_config=serve_logging(config.log))
    before = _overview()
    target = serve.RunTarget(application, name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    _wait(models, on_progress, frozenset() if before is None else frozenset(_messages(before)))


def remove() -> None:
    """Remove the application once its requests have ended: Ray Serve waits for them as long as they may drain."""
    if is_deployed():
        serve.delete(APPLICATION, _blocking=False)
    while is_deployed():
        time.sleep(POLL_S)


def progress(models: Sequence[ClusterModel]) -> RolloutProgress:
    return _progress(_overview(), models)


def _wait(models: Sequence[ClusterModel], on_progress: Callable[[RolloutProgress], None], old: frozenset[str]) -> None:
    """`old`: messages of what was deployed before."""
    seen: RolloutProgress | None = None
    while True:
        overview = _overview()
        now = _progress(overview, models)
        if now != seen:
            on_progress(now)
            seen = now
        if overview is None:
            raise ClusterError("the application was removed while it was being deployed")
        if overview.status == "RUNNING" or (_serves(overview) and not has_room(models)):
            return
        if failure := why_failed(overview, old):
            raise ClusterError(failure)
        time.sleep(POLL_S)


def _overview() -> ApplicationStatusOverview | None:
    return serve.status().applications.get(APPLICATION)


def _progress(overview: ApplicationStatusOverview | None, models: Sequence[ClusterModel]) -> RolloutProgress:
    found = {} if overview is None else overview.deployments
    states = [found[model.deployment].replica_states for model in models if model.deployment in found]
    ready = sum(each.get("RUNNING", 0) for each in states)
    scales = any(model.config.cluster.autoscaling.max_replicas is not None for model in models)
    wanted = sum(model.config.cluster.first_replicas for model in models)
    return RolloutProgress(ready, max(ready, wanted) if scales else wanted)


def _serves(overview: ApplicationStatusOverview) -> bool:
    """An ingress is ready once each model has a replica."""
    ingress = overview.deployments.get(INGRESS)
    return ingress is not None and ingress.replica_states.get("RUNNING", 0) > 0


def _messages(overview: ApplicationStatusOverview) -> list[str]:
    return [overview.message, *(each.message for each in overview.deployments.values())]


def why_failed(overview: ApplicationStatusOverview, old: frozenset[str] = frozenset()) -> str | None:
    """One line, or None if it may still succeed. An error of cLLM is final: it would be the same again."""
    is_over = overview.status == "DEPLOY_FAILED"
    messages = [message for message in _messages(overview) if is_over or message not in old]
    for message in messages:
        if found := _OWN_ERROR.findall(message):
            return str(found[-1])
    if not is_over:
        return None
    text = max(messages, key=len)
    found = _ANY_ERROR.findall(text)
    return str(found[-1] if found else next(iter(text.splitlines()), "") or "Ray Serve does not say why")


# -- models ----------------------------------------------------------------------------------------------------------


def check_models(models: Sequence[ClusterModel]) -> None:
    """On the head, which has the files of all models: what no replica could load would fail only after others have
    stopped to make room for it. Raises `ConfigError`."""
    look = ray.remote(num_cpus=0, resources=ON_HEAD)(_why_not_loadable)
    for problem in ray.get([look.remote(model.config) for model in models]):
        if problem is not None:
            raise ConfigError(problem)


def _why_not_loadable(config: Config) -> str | None:
    from cllm.loading.check import check_loadable

    try:
        check_loadable(config)
    except CLLMError as error:
        return str(error)
    return None


# -- room ------------------------------------------------------------------------------------------------------------


def check_room(models: Sequence[ClusterModel]) -> None:
    """Ray would wait for ever for a machine that is large enough."""
    machines = [node["Resources"] for node in nodes()]
    for model in models:
        settings = model.config.cluster
        asked = (("cpus", settings.cpus, "CPU", 1), ("gpus", settings.gpus, "GPU", 1))
        for key, amount, resource, unit in (*asked, ("memory_mb", settings.memory_mb or 0, "memory", _MIB)):
            most = max((machine.get(resource, 0.0) for machine in machines), default=0.0) / unit
            if amount > most + _ROUNDING:
                raise ConfigError(
                    f"cluster.{key} is {amount:g}, but no machine of the cluster has more than {most:.6g}: lower it, "
                    "or add a larger machine"
                )


def has_room(models: Sequence[ClusterModel]) -> bool:
    """Whether all replicas fit on the machines that there are, the largest first."""
    machines = [dict(node["Resources"]) for node in nodes()]
    for settings in sorted((model.config.cluster for model in models), key=lambda each: -each.cpus):
        needed = {"CPU": settings.cpus, "GPU": settings.gpus, "memory": (settings.memory_mb or 0) * _MIB}
        left = settings.first_replicas
        for machine in machines:
            left -= _take_room(machine, needed, min(left, settings.max_replicas_per_node or left))
        if left > 0:
            return False
    return True


def _take_room(machine: dict[str, float], needed: Mapping[str, float], most: int) -> int:
    """How many of at most `most` fit on the machine, which has that much less room afterwards."""
    amounts = {resource: amount for resource, amount in needed.items() if amount > 0}
    fitting = [math.floor(machine.get(resource, 0.0) / amount + _ROUNDING) for resource, amount in amounts.items()]
    count = min([*fitting, most])
    if count > 0:
        for resource, amount in amounts.items():
            machine[resource] -= count * amount
    return count
