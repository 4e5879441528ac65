"""A replica: a loaded model as a Ray Serve deployment."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray
from ray import serve

from cllm.cluster.autoscaling import KV_USE
from cllm.cluster.forwarder import Forwarder
from cllm.cluster.link import Link
from cllm.cluster.link_server import LinkServer
from cllm.cluster.messages import Accepted, Job, Refusal
from cllm.cluster.share import own_share
from cllm.config import Config
from cllm.engine.request import Request
from cllm.errors import CLLMError, OverloadedError, ShuttingDownError
from cllm.llm import AsyncLLM
from cllm.loading.facts import ModelFacts
from cllm.machine import read_cpus
from cllm.observe.log import setup_logging
from cllm.observe.metrics import MetricsObserver

log = logging.getLogger("cllm.cluster")


class Replica:
    """Ray Serve calls `run` for each job, and the methods below it to watch the replica. Everything else comes and goes
    over links."""

    async def __init__(self, config: Config, version: str, replicas: int) -> None:  # type: ignore[misc]
        """`version`: of its settings. `replicas`: the most that all models of the cluster have together."""
        setup_logging(config.log)
        self._version = version
        self._llm = AsyncLLM(own_share(config, read_cpus(), _node_cpus(), replicas))
        observer = MetricsObserver()
        self._llm.observers.append(observer)
        await self._llm.start()
        self.id: str = serve.get_replica_context().replica_id.unique_id
        self._links = LinkServer(self._llm, self.id, observer)
        self._links.calls = {"unpin": self._llm.unpin, "lost_pins": self._llm.lost_pins}
        self._address = (ray.util.get_node_ip_address(), await self._links.start())

    async def run(self, job: Job) -> Refusal | None:
        """Ends when the job has ended."""
        link = self._links.link_to(job.ingress)
        if link is None:
            return Refusal(self.id, ShuttingDownError("the ingress has no link to this replica"), elsewhere=True)
        try:
            forwarder = await self._submit(job, link)
        except (OverloadedError, ShuttingDownError) as error:
            return Refusal(self.id, error, elsewhere=True)
        except CLLMError as error:
            return Refusal(self.id, error, elsewhere=False)
        key = job.ingress, job.number
        self._links.forwarders[key] = forwarder
        link.send(Accepted(job.number))
        try:
            await forwarder.ended
        except asyncio.CancelledError:
            self._llm.cancel(forwarder.request.id)
            raise
        finally:
            del self._links.forwarders[key]
        return None

    async def facts(self, version: str) -> ModelFacts | None:
        """None: its settings are not those that the ingress has. One of the two is about to be replaced."""
        return self._llm.facts if version == self._version else None

    async def _submit(self, job: Job, link: Link) -> Forwarder:
        structure = job.params.structured
        grammar = None if structure is None else await self._llm.compile(structure)
        request_id = f"{job.request_id}~{job.number}"

        def forwarder_of(request: Request) -> Forwarder:
            return Forwarder(link, job, request)

        if job.embeds:
            return self._llm.submit_embedding_to(
                forwarder_of,
                job.prompt,
                request_id=request_id,
                priority=job.priority,
                timeout_s=job.timeout_s,
                tenant=job.tenant,
            )
        return self._llm.submit_to(
            forwarder_of,
            job.prompt,
            job.params,
            request_id=request_id,
            priority=job.priority,
            timeout_s=job.timeout_s,
            tenant=job.tenant,
            pins=job.pins,
            grammar=grammar,
            generated=job.generated,
        )

    # -- called by Ray Serve -----------------------------------------------------------------------------------

    def record_routing_stats(self) -> dict[str, Any]:
        """How an ingress finds this replica, and its load."""
        host, port = self._address
        stats = self._links.stats()
        return {
            "host": host,
            "port": port,
            "secret": self._links.secret.hex(),
            "queued_tokens": stats.queued_tokens,
            "rows": stats.rows,
            "at": time.time(),
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {KV_USE: self._llm.snapshot().kv.used_fraction}

    def check_health(self) -> None:
        if not self._llm.ready:
            raise RuntimeError("the engine has stopped")

    async def __del__(self) -> None:
        await self._links.close()
        await self._llm.shutdown(0)


def _node_cpus() -> float:
    """What Ray may hand out on this machine."""
    own = ray.get_runtime_context().get_node_id()
    return next((float(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["NodeID"] == own), 0.0)
