"""The `cluster` section: replicas on many machines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cllm.config.section import Section


class ClusterConfig(Section):
    replicas: int = Field(default=1, ge=1, le=10_000, description="number of replicas of the model")
    cpus: float = Field(default=1.0, ge=0, le=1024, description="CPUs that Ray reserves for each replica")
    gpus: float = Field(default=0.0, ge=0, le=64, description="GPUs that Ray reserves for each replica")
    ingresses: int = Field(default=1, ge=1, le=1000, description="number of ingresses: HTTP servers and routers")
    routing: Literal["prefix", "least-loaded", "consistent-hash", "round-robin", "random"] = Field(
        default="prefix",
        description="how requests are routed; prefix: to the replica with the least work until the first token, given "
        "its load and what it has cached",
    )
    silence_s: float = Field(
        default=5.0, ge=1, le=600, description="a replica that says nothing for this long counts as lost"
    )
    wait_s: float = Field(
        default=30.0, ge=0, le=3600, description="how long a request waits while no replica is available"
    )
    max_sends: int = Field(
        default=5, ge=1, le=100, description="a request fails after this many replicas were lost while working on it"
    )
    drain_s: float = Field(
        default=30.0, ge=0, le=3600, description="how long a replica that is stopped may finish its requests"
    )
