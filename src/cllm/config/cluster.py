"""The `cluster` section: replicas on many machines (docs/cluster.md)."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from cllm.config.section import Section, must_be, setting

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}")


RAY_WORKER_PORTS = range(10_001, 20_000)
"""Where `ray start` lets its workers, and clients of its own, listen."""


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT."""
    return _ADDRESS.fullmatch(text) is not None


class AutoscalingConfig(Section):
    min_replicas: int = setting(1, "minimum number of replicas", ge=1, le=10_000)
    max_replicas: int | None = setting(None, "maximum number of replicas (null: no autoscaling)", ge=1, le=10_000)
    target_requests: float = setting(
        16.0, "target number of running and waiting requests per replica", gt=0, le=100_000
    )
    target_kv_use: float = setting(0.8, "target share of a replica's KV memory that running requests hold", gt=0, le=1)
    upscale_delay_s: float = setting(
        10.0, "how long more replicas must be needed before they are added", ge=0, le=86_400
    )
    downscale_delay_s: float = setting(
        300.0, "how long fewer replicas must be needed before some are removed", ge=0, le=86_400
    )


class ClusterConfig(Section):
    replicas: int | None = setting(
        None,
        "number of replicas of each model; with autoscaling, at the start (null: 1, or autoscaling.min_replicas)",
        ge=1,
        le=10_000,
    )
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    cpus: float = setting(
        1.0,
        "CPUs reserved for each replica, and its number of compute threads unless backend.threads is set; "
        "0: none are reserved, and each replica uses all CPUs of its machine",
        ge=0,
        le=4096,
    )
    gpus: float = setting(0.0, "GPUs reserved for each replica; replicas may share one: 0.5", ge=0, le=64)
    memory_mb: float | None = setting(
        None,
        "memory in MiB reserved for each replica, which then sizes its KV cache as in a container with "
        "this limit (null: replicas of a machine share its memory)",
        gt=0,
    )
    max_replicas_per_node: int | None = setting(
        None, "maximum number of replicas of a model on one machine (null: no limit)", ge=1, le=100
    )
    ingresses: int = setting(1, "number of ingresses (HTTP servers and routers); they share server.port", ge=1, le=64)
    address: str | None = setting(
        None,
        "Ray cluster to use: HOST:PORT, or auto for the one that runs on this machine (null: `cllm cluster "
        "up` starts one)",
    )
    node_ip: str | None = setting(None, "address of this machine in the cluster (null: found by Ray)", min_length=1)
    ray_port: int = setting(
        6379,
        "port on which other machines join a cluster that `cllm cluster up` starts; 0: any free port",
        ge=0,
        le=65_535,
    )
    routing: Literal["prefix", "least-loaded", "consistent-hash", "round-robin", "random"] = setting(
        "prefix",
        "how requests are routed; prefix: to the replica with the least work until the first token, given "
        "its load and what it has cached",
    )
    silence_s: float = setting(5.0, "a replica that says nothing for this long counts as lost", ge=1, le=600)
    wait_s: float = setting(30.0, "how long a request waits while no replica is available", ge=1, le=3600)
    max_sends: int = setting(5, "a request fails after this many replicas were lost while working on it", ge=1, le=100)
    drain_s: float = setting(30.0, "how long a replica that is stopped may finish its requests", ge=0, le=3600)
    surge_percent: int = setting(
        0,
        "extra replicas during an update, in percent: new ones start before old ones stop, which needs "
        "free CPUs; 0: old ones stop first, a fifth of them at a time",
        ge=0,
        le=100,
    )

    @field_validator("address")
    @classmethod
    def _address_is_one(cls, address: str | None) -> str | None:
        if address not in (None, "auto") and not is_address(address):
            raise must_be("auto, or HOST:PORT such as 10.0.0.1:6379")
        return address

    @field_validator("ray_port")
    @classmethod
    def _ray_port_is_free_of_workers(cls, port: int) -> int:
        if port in RAY_WORKER_PORTS:
            ports = f"{RAY_WORKER_PORTS[0]} to {RAY_WORKER_PORTS[-1]}"
            raise must_be(f"outside of {ports}, which are for Ray's own processes")
        return port

    @property
    def first_replicas(self) -> int:
        """At the start."""
        if self.replicas is not None:
            return self.replicas
        return self.autoscaling.min_replicas if self.autoscaling.max_replicas is not None else 1

    @property
    def most_replicas(self) -> int:
        return self.autoscaling.max_replicas or self.first_replicas
