"""A Ray Serve application from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from cllm.cluster.autoscaling import QueueAndKVPolicy
from cllm.cluster.ingress import Ingress
from cllm.cluster.models import INGRESS, ClusterModel, cluster_models, version_of, with_absolute_paths
from cllm.cluster.replica import Replica
from cllm.cluster.router import PrefixRouter
from cllm.config import Config, load_config, parse_assignment
from cllm.config.cluster import ClusterConfig
from cllm.config.schema import LogConfig
from cllm.errors import CLLMError, ConfigError

APPLICATION = "cllm"
"""Its name in Ray Serve."""
_ONE_LOOP = {
    "runtime_env": {
        "env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
    }
}
"""Ray Serve's part of a process and ours share an event loop: a request changes threads four times less."""
_MANY = 100_000
"""Ray Serve's limit of concurrent calls: it is the engine that refuses."""
ON_HEAD = {"node:__internal_head__": 0.001}
"""Ingresses that listen themselves run where clients look for them."""
_LOOK_BACK_S = 5.0
"""Load is averaged over this time."""
_REPORT_S = 2.0
_MIB = 1 << 20


def build(args: Mapping[str, Any]) -> serve.Application:
    """For `serve run cllm.cluster:build config=FILE`, `serve deploy` and KubeRay. Everything beside `config` is a
    setting: cluster.replicas=2, or sections as in a file. Requests come through Ray Serve's proxy."""
    import click

    try:
        return build_application(load_arguments(args), listens=False)
    except CLLMError as error:
        # One line of `serve run`, instead of a traceback.
        raise click.ClickException(str(error)) from error


def load_arguments(args: Mapping[str, Any]) -> Config:
    """Raises `ConfigError`."""
    settings = {str(key): value for key, value in args.items()}
    file = settings.pop("config", None)
    if file is not None and not isinstance(file, str):
        raise ConfigError(f"config is {file!r}: it must be the path of a configuration file")
    for key, value in settings.items():
        if isinstance(value, str):  # from a command line
            settings[key] = parse_assignment(f"{key}={value}")[1]
    return load_config(None if file is None else Path(file).expanduser(), settings).config


def build_application(config: Config, *, listens: bool) -> serve.Application:
    """`listens`: whether ingresses have a port of their own; otherwise requests come through Ray Serve's proxy."""
    config = with_absolute_paths(config)
    models = cluster_models(config)
    replicas = [_deployment(model).bind(model.config, model.version, model.most) for model in models]
    settings = config.cluster
    ingress = serve.deployment(Ingress).options(
        name=INGRESS,
        num_replicas=settings.ingresses,
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=settings.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2,  # one that has died is replaced at the next check
        max_surge_percent=100,  # it needs no CPU, so the new one can always start before the old one stops
        logging_config=serve_logging(config.log),
        ray_actor_options={"num_cpus": 0, **({"resources": ON_HEAD} if listens else {}), **_ONE_LOOP},
        version=version_of(config, without=("cluster.replicas", "cluster.autoscaling")),
        _internal=True,  # for the version
    )
    return ingress.bind(config, replicas, listens)


def _deployment(model: ClusterModel) -> Any:
    settings = model.config.cluster
    router = RequestRouterConfig(
        request_router_class=PrefixRouter,
        request_router_kwargs={"model": model.deployment},
        request_routing_stats_period_s=1.0,
        request_routing_stats_timeout_s=5.0,
    )
    resources: dict[str, Any] = {"num_cpus": settings.cpus, "num_gpus": settings.gpus}
    if settings.memory_mb is not None:
        resources["memory"] = int(settings.memory_mb * _MIB)
    options: dict[str, Any] = {"num_replicas": settings.first_replicas}
    if settings.autoscaling.max_replicas is not None:
        options = {"autoscaling_config": _autoscaling(settings)}
    if settings.max_replicas_per_node is not None:
        options["max_replicas_per_node"] = settings.max_replicas_per_node
    return serve.deployment(Replica).options(
        name=model.deployment,
        max_ongoing_requests=_MANY,
        request_router_config=router,
        graceful_shutdown_timeout_s=settings.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2,
        health_check_timeout_s=10,
        max_surge_percent=settings.surge_percent,
        logging_config=serve_logging(model.config.log),
        ray_actor_options={**resources, **_ONE_LOOP},
        version=model.version,
        _internal=True,  # for the version: replicas whose settings stay the same are not started again
        **options,
    )


def _autoscaling(settings: ClusterConfig) -> AutoscalingConfig:
    scaling = settings.autoscaling
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        initial_replicas=settings.replicas,
        max_replicas=scaling.max_replicas,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        metrics_interval_s=_REPORT_S,
        look_back_period_s=_LOOK_BACK_S,
        policy=AutoscalingPolicy(
            policy_function=QueueAndKVPolicy,
            policy_kwargs={"target_requests": scaling.target_requests, "target_kv_use": scaling.target_kv_use},
        ),
    )


def serve_logging(config: LogConfig) -> dict[str, Any]:
    """Ray Serve's own lines: its events at `info` are details to users of cLLM."""
    level = {"debug": "DEBUG", "info": "WARNING", "warning": "WARNING", "error": "ERROR"}[config.level]
    return {"log_level": level, "enable_access_log": False}
