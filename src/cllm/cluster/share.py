"""What a replica takes of its machine. By itself each would take what a single server takes: all CPUs, and a share of
all memory. So what is not set is set here, by what is reserved for the replica and by how many fit on its machine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from cllm.config import Config
from cllm.loading.torch_model import GPU_KV_FRACTION
from cllm.machine import Cpus, default_threads


def own_share(config: Config, cpus: Cpus, node_cpus: float, replicas: int) -> Config:
    """The settings of a replica. `cpus`: what the process may use. `node_cpus`: what Ray may hand out on this machine.
    `replicas`: the most that all models of the cluster have together."""
    reserved = config.cluster.cpus
    threads: dict[str, Any] = {}
    if config.backend.threads is None and reserved > 0:
        threads = {"threads": default_threads(replace(cpus, quota=min(reserved, cpus.quota or reserved))).count}
    return config.model_copy(
        update={
            "backend": config.backend.model_copy(update=threads),
            "resources": config.resources.model_copy(update=_memory(config, node_cpus, replicas)),
        }
    )


def _memory(config: Config, node_cpus: float, replicas: int) -> dict[str, Any]:
    cluster, resources = config.cluster, config.resources
    if cluster.gpus > 0:
        sharing = math.floor(1 / cluster.gpus + 1e-6) if cluster.gpus < 1 else 1
        fraction = GPU_KV_FRACTION if "kv_memory_fraction" not in resources.model_fields_set else None
        return _divided(config, fraction, sharing)
    if cluster.memory_mb is not None:
        limit = (
            cluster.memory_mb if resources.max_memory_mb is None else min(cluster.memory_mb, resources.max_memory_mb)
        )
        return {"max_memory_mb": limit}
    return _divided(config, None, neighbours(config, node_cpus, replicas))


def _divided(config: Config, fraction: float | None, sharing: int) -> dict[str, Any]:
    """A limit in bytes is one replica's already."""
    if sharing <= 1 or config.resources.kv_cache_max_memory_mb is not None:
        return {}
    return {"kv_memory_fraction": (fraction or config.resources.kv_memory_fraction) / sharing}


def neighbours(config: Config, node_cpus: float, replicas: int) -> int:
    """How many replicas may share a machine, this one included."""
    cluster = config.cluster
    fitting = math.floor(node_cpus / cluster.cpus + 1e-6) if cluster.cpus > 0 else replicas
    return max(1, min(fitting, replicas))
