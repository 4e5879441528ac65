"""A replica as a Ray Serve deployment."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve

from cllm.cluster.autoscaling import KV_USE
from cllm.cluster.messages import Refusal, ReplicaJob
from cllm.cluster.replica_core import ReplicaCore
from cllm.cluster.share import own_share
from cllm.config import Config
from cllm.llm import AsyncLLM
from cllm.loading.facts import ModelFacts
from cllm.machine import read_cpus
from cllm.machine.resident import keep_loaded_objects
from cllm.observe.log import setup_logging


class Replica:
    """Ray Serve calls `run` for each job, and the methods below it to watch the replica. Everything else comes and goes
    over links."""

    async def __init__(self, config: Config, version: str, replicas: int) -> None:  # type: ignore[misc]
        """`version`: of its settings. `replicas`: the most that all models of the cluster have together."""
        setup_logging(config.log)
        self._version = version
        self._llm = AsyncLLM(own_share(config, read_cpus(), _node_cpus(), replicas))
        self._core = ReplicaCore(self._llm, serve.get_replica_context().replica_id.unique_id)
        await self._core.start()
        keep_loaded_objects()
        self._host: str = ray.util.get_node_ip_address()

    async def run(self, job: ReplicaJob) -> Refusal | None:
        """Ends when the job has ended."""
        return await self._core.run(job)

    async def facts(self, version: str) -> ModelFacts | None:
        """None: its settings are not those that the ingress has. One of the two is about to be replaced."""
        return self._llm.text.facts if version == self._version else None

    # -- called by Ray Serve -----------------------------------------------------------------------------------

    def record_routing_stats(self) -> dict[str, Any]:
        """How an ingress finds this replica. Ray tells all ingresses whenever it changes, so it does not."""
        return {"host": self._host, "port": self._core.port, "secret": self._core.secret.hex()}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {KV_USE: self._llm.executor.snapshot().kv.used_fraction}

    def check_health(self) -> None:
        if not self._llm.ready:
            raise RuntimeError("the engine has stopped")

    async def __del__(self) -> None:
        await self._core.close()


def _node_cpus() -> float:
    """What Ray may hand out on this machine."""
    own = ray.get_runtime_context().get_node_id()
    return next((float(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["NodeID"] == own), 0.0)
