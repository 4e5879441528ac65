"""A Ray Serve application from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from cllm.cluster.ingress import Ingress
from cllm.cluster.replica import Replica
from cllm.cluster.router import PrefixRouter
from cllm.config import Config, load_config

_ONE_LOOP = {
    "runtime_env": {
        "env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
    }
}
"""Ray Serve's part of a process and ours share an event loop: a request changes threads four times less."""


def build(args: dict[str, Any]) -> serve.Application:
    """For `serve run cllm.cluster:build config=FILE`, `serve deploy` and KubeRay."""
    config = load_config(Path(args["config"]) if "config" in args else None).config
    return build_application(config, listens=False)


def build_application(config: Config, *, listens: bool) -> serve.Application:
    """`listens`: whether the ingress has a port of its own; otherwise requests come through Ray Serve's proxy."""
    settings = config.cluster
    router = RequestRouterConfig(
        request_router_class=PrefixRouter,
        request_router_kwargs={"model": config.model.name},
        request_routing_stats_period_s=1.0,
        request_routing_stats_timeout_s=5.0,
    )
    replica = serve.deployment(Replica).options(
        name="replica",
        num_replicas=settings.replicas,
        max_ongoing_requests=100_000,
        request_router_config=router,
        graceful_shutdown_timeout_s=settings.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2,
        health_check_timeout_s=10,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus, **_ONE_LOOP},
    )
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=settings.ingresses,
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=settings.drain_s,
        ray_actor_options={"num_cpus": 0, **_ONE_LOOP},
    )
    return ingress.bind(config, replica.bind(config), listens)
