"""The `cluster` section: replicas on many machines (docs/cluster.md)."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from cllm.config.section import Section

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}")


RAY_WORKER_PORTS = range(10_001, 20_000)
"""Where `ray start` lets its workers, and clients of its own, listen."""


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT."""
    return _ADDRESS.fullmatch(text) is not None


class AutoscalingConfig(Section):
    min_replicas: int = Field(default=1, ge=1, le=10_000, description="minimum number of replicas")
    max_replicas: int | None = Field(
        default=None, ge=1, le=10_000, description="maximum number of replicas (null: no autoscaling)"
    )
    target_requests: float = Field(
        default=16.0, gt=0, le=100_000, description="target number of running and waiting requests per replica"
    )
    target_kv_use: float = Field(
        default=0.8, gt=0, le=1, description="target share of a replica's KV memory that running requests hold"
    )
    upscale_delay_s: float = Field(
        default=10.0, ge=0, le=86_400, description="how long more replicas must be needed before they are added"
    )
    downscale_delay_s: float = Field(
        default=300.0, ge=0, le=86_400, description="how long fewer replicas must be needed before some are removed"
    )


class ClusterConfig(Section):
    replicas: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="number of replicas of each model; with autoscaling, at the start (null: 1, or "
        "autoscaling.min_replicas)",
    )
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    cpus: float = Field(
        default=1.0,
        ge=0,
        le=4096,
        description="CPUs reserved for each replica, and its number of compute threads unless backend.threads is set; "
        "0: none are reserved, and each replica uses all CPUs of its machine",
    )
    gpus: float = Field(
        default=0.0, ge=0, le=64, description="GPUs reserved for each replica; replicas may share one: 0.5"
    )
    memory_mb: float | None = Field(
        default=None,
        gt=0,
        description="memory in MiB reserved for each replica, which then sizes its KV cache as in a container with "
        "this limit (null: replicas of a machine share its memory)",
    )
    max_replicas_per_node: int | None = Field(
        default=None, ge=1, le=100, description="maximum number of replicas of a model on one machine (null: no limit)"
    )
    ingresses: int = Field(
        default=1, ge=1, le=64, description="number of ingresses (HTTP servers and routers); they share server.port"
    )
    address: str | None = Field(
        default=None,
        description="Ray cluster to use: HOST:PORT, or auto for the one that runs on this machine (null: `cllm cluster "
        "up` starts one)",
    )
    node_ip: str | None = Field(
        default=None, min_length=1, description="address of this machine in the cluster (null: found by Ray)"
    )
    ray_port: int = Field(
        default=6379,
        ge=0,
        le=65_535,
        description="port on which other machines join a cluster that `cllm cluster up` starts; 0: any free port",
    )
    routing: Literal["prefix", "least-loaded", "consistent-hash", "round-robin", "random"] = Field(
        default="prefix",
        description="how requests are routed; prefix: to the replica with the least work until the first token, given "
        "its load and what it has cached",
    )
    silence_s: float = Field(
        default=5.0, ge=1, le=600, description="a replica that says nothing for this long counts as lost"
    )
    wait_s: float = Field(
        default=30.0, ge=1, le=3600, description="how long a request waits while no replica is available"
    )
    max_sends: int = Field(
        default=5, ge=1, le=100, description="a request fails after this many replicas were lost while working on it"
    )
    drain_s: float = Field(
        default=30.0, ge=0, le=3600, description="how long a replica that is stopped may finish its requests"
    )
    surge_percent: int = Field(
        default=0,
        ge=0,
        le=100,
        description="extra replicas during an update, in percent: new ones start before old ones stop, which needs "
        "free CPUs; 0: old ones stop first, a fifth of them at a time",
    )

    @field_validator("address")
    @classmethod
    def _address_is_one(cls, address: str | None) -> str | None:
        if address not in (None, "auto") and not is_address(address):
            problem = "auto, or HOST:PORT such as 10.0.0.1:6379"
            raise PydanticCustomError("pattern", "{problem}", {"problem": problem})
        return address

    @field_validator("ray_port")
    @classmethod
    def _ray_port_is_free_of_workers(cls, port: int) -> int:
        if port in RAY_WORKER_PORTS:
            problem = f"outside of {RAY_WORKER_PORTS[0]} to {RAY_WORKER_PORTS[-1]}, which are for Ray's own processes"
            raise PydanticCustomError("range", "{problem}", {"problem": problem})
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
