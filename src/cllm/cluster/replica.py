"""A replica as a Ray Serve deployment."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray import serve

from cllm.cluster.messages import Job, Refusal
from cllm.cluster.replica_core import ReplicaCore
from cllm.config import Config
from cllm.llm import AsyncLLM
from cllm.loading.facts import ModelFacts


class Replica:
    """Ray Serve calls `run` for each job, and the methods below it to watch the replica. Everything else comes and goes
    over links."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]
        self._core = ReplicaCore(AsyncLLM(config), serve.get_replica_context().replica_id.unique_id)
        await self._core.start()
        self._host: str = ray.util.get_node_ip_address()

    async def run(self, job: Job) -> Refusal | None:
        """Ends when the job has ended."""
        return await self._core.run(job)

    async def facts(self) -> ModelFacts:
        return self._core.facts

    # -- called by Ray Serve -----------------------------------------------------------------------------------

    def record_routing_stats(self) -> dict[str, Any]:
        """How an ingress finds this replica, and its load."""
        stats = self._core.stats
        return {
            "host": self._host,
            "port": self._core.port,
            "secret": self._core.secret.hex(),
            "queued_tokens": stats.queued_tokens,
            "rows": stats.rows,
            "at": time.time(),
        }

    def check_health(self) -> None:
        if not self._core.ready:
            raise RuntimeError("the engine has stopped")

    async def __del__(self) -> None:
        await self._core.close()
