"""What a replica is, apart from Ray: a loaded model that works on jobs."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial

from cllm.cluster.forwarder import Forwarder
from cllm.cluster.link import Link
from cllm.cluster.link_server import LinkServer
from cllm.cluster.messages import Accepted, Refusal, ReplicaJob, portable
from cllm.engine.submission import Submission
from cllm.engine.tenant import ANONYMOUS, Tenant
from cllm.errors import CLLMError, ConfigError, OverloadedError, ShuttingDownError
from cllm.llm import AsyncLLM
from cllm.loading.facts import ModelFacts
from cllm.observe.metrics import MetricsObserver
from cllm.server.auth.tenants import Tenants
from cllm.tasks.warm import restore_pins, warm_up

log = logging.getLogger("cllm.cluster")

_NO_LINK = "the ingress has no link to this replica"


class ReplicaCore:
    def __init__(self, llm: AsyncLLM, name: str) -> None:
        self.name = name
        self.port = 0
        self._llm = llm
        observer = MetricsObserver()
        llm.observers.append(observer)
        self._links = LinkServer(llm, name, observer)
        self._warming: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._llm.start()
        self._llm.restore_pins = restore_pins
        self._warming = asyncio.create_task(self._warm_up())
        if self._llm.config.kv.warm_before_ready:
            await self._warming
        self._links.calls = {"unpin": self._llm.executor.unpin, "report": self._links.report}
        self.port = await self._links.start()

    async def _warm_up(self) -> None:
        """Compute `kv.warm`."""
        config = self._llm.config
        if not config.kv.warm:
            return
        try:
            tenants = Tenants(config.server) if config.server.needs_key else None
        except ConfigError as error:
            log.warning("kv.warm was not computed: %s", error)
            return
        await warm_up(self._llm, config.kv.warm, _for_everyone if tenants is None else tenants.warm_tenant)

    async def close(self) -> None:
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        await self._links.close()
        await self._llm.shutdown(0)

    @property
    def secret(self) -> bytes:
        """What an ingress must know to link to it."""
        return self._links.secret

    @property
    def facts(self) -> ModelFacts:
        return self._llm.text.facts

    async def run(self, job: ReplicaJob) -> Refusal | None:
        """Ends when the job has ended."""
        link = self._links.links.get(job.ingress)
        if link is None:
            return Refusal(self.name, ShuttingDownError(_NO_LINK), elsewhere=True)
        try:
            forwarder = await self._submit(job.submission, link)
        except (OverloadedError, ShuttingDownError) as error:
            return Refusal(self.name, error, elsewhere=True)
        except CLLMError as error:
            return Refusal(self.name, portable(error), elsewhere=False)
        if link.closed:  # while a grammar was compiled
            self._llm.cancel(forwarder.request.id)
            return Refusal(self.name, ShuttingDownError(_NO_LINK), elsewhere=True)
        key = job.ingress, job.name
        self._links.forwarders[key] = forwarder
        link.send(Accepted(job.name))
        try:
            await forwarder.ended
        except asyncio.CancelledError:
            self._llm.cancel(forwarder.request.id)
            raise
        finally:
            del self._links.forwarders[key]
        return None

    async def _submit(self, submission: Submission, link: Link) -> Forwarder:
        if (structure := submission.params.structured) is not None:
            submission = replace(submission, grammar=await self._llm.text.compile(structure))
        return self._llm.queue_for(submission, partial(Forwarder, link))


def _for_everyone(shared: bool) -> Tenant:
    return ANONYMOUS
