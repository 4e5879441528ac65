"""A replica's side of the links: tells each ingress what it needs to know, and does what it asks."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from cllm.cluster.forwarder import Forwarder
from cllm.cluster.link import Link, accept
from cllm.cluster.messages import (
    CacheContent,
    CacheEvents,
    Call,
    Cancel,
    Greeting,
    Hello,
    ReplicaLoad,
    Reply,
    Report,
    portable,
)
from cllm.errors import CLLMError, ShuttingDownError, describe
from cllm.executor import LocalExecutor
from cllm.kv.events import Listener
from cllm.llm import AsyncLLM
from cllm.observe.metrics import MetricsObserver
from cllm.routing.policy import ReplicaStats

log = logging.getLogger("cllm.cluster")

EVENTS_S = 0.05
"""How often events of the prefix cache are sent."""
LOAD_S = 0.25
REPORT_S = 1.0


class LinkServer:
    def __init__(self, llm: AsyncLLM, replica: str, observer: MetricsObserver) -> None:
        self.secret = secrets.token_bytes(32)
        self.forwarders: dict[tuple[str, str], Forwarder] = {}
        """By ingress and job."""
        self.calls: dict[str, Callable[..., Awaitable[Any]]] = {}
        """What an ingress may call, by name."""
        assert isinstance(llm.executor, LocalExecutor)
        self._llm = llm
        self._executor = llm.executor
        self._replica = replica
        self._observer = observer
        self.links: dict[str, Link] = {}
        """By ingress."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """The port."""
        self._server = await asyncio.start_server(self._serve, "0.0.0.0", 0)  # guarded by the secret
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self.links.values()):
            link.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stats(self) -> ReplicaStats:
        requests = self._llm.requests()
        queued = sum(len(request.prompt) - request.computed for request in requests)
        return ReplicaStats(queued, sum(request.unfinished for request in requests))

    async def report(self) -> Report:
        return Report(self._executor.snapshot(), self._executor.kv(), self._observer)

    # -- one ingress -------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            link = await accept(reader, writer, self.secret)
        except OSError as error:
            log.warning("refused a connection: %s", error)
            return
        ingress = ""
        telling: list[asyncio.Task[None]] = []
        try:
            async for messages in link.messages():
                for message in messages:
                    if isinstance(message, Greeting):
                        ingress = message.ingress
                        self.links[ingress] = link
                        telling = [self._spawn(tell(link)) for tell in (self._tell_cache, self._tell_load)]
                    else:
                        self._take(link, ingress, message)
        finally:
            for task in telling:
                task.cancel()
            if self.links.get(ingress) is link:
                del self.links[ingress]
            self._drop_jobs(ingress, link)

    def _take(self, link: Link, ingress: str, message: Any) -> None:
        if isinstance(message, Cancel):
            forwarder = self.forwarders.get((ingress, message.job))
            if forwarder is not None:
                self._llm.cancel(forwarder.request.id, message.answer, message.reason)
                if message.answer is None:
                    forwarder.abandon()
        elif isinstance(message, Call):
            self._spawn(self._answer(link, message))

    def _drop_jobs(self, ingress: str, link: Link) -> None:
        """Their ingress is gone, or has given up on this replica."""
        for key, forwarder in list(self.forwarders.items()):
            if key[0] == ingress and forwarder.link is link:
                self._llm.cancel(forwarder.request.id)
                forwarder.abandon()

    async def _answer(self, link: Link, call: Call) -> None:
        try:
            value = await self.calls[call.name](*call.arguments)
        except CLLMError as error:
            link.send(Reply(call.number, None, portable(error)))
        except Exception as error:
            log.exception("the call %s failed", call.name)
            link.send(Reply(call.number, None, CLLMError(describe(error))))
        else:
            link.send(Reply(call.number, value, None))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._llm.ready:
            log.error("an ingress is told nothing more", exc_info=error)

    # -- what an ingress is told -------------------------------------------------------------------------------

    async def _tell_cache(self, link: Link) -> None:
        """Everything that enters and leaves the prefix cache."""
        try:
            listener = await self._executor.listen()
            block_tokens = self._block_tokens if listener is not None else 0
            link.send(Hello(self._replica, self._llm.text.facts, block_tokens, os.getpid()))
            if listener is None:
                return
            await self._tell_content(link)
            while not link.closed:
                await self._tell_events(link, listener)
                await asyncio.sleep(EVENTS_S)
        except ShuttingDownError:
            pass

    async def _tell_events(self, link: Link, listener: Listener) -> None:
        events = listener.take()
        if events:
            link.send(CacheEvents(events))
            if any(event.kind == "gap" for event in events):
                await self._tell_content(link)

    async def _tell_content(self, link: Link) -> None:
        number, names = await self._executor.held_names()
        link.send(CacheContent(number, list(names)))

    async def _tell_load(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        report_at = 0.0
        while not link.closed:
            link.send(ReplicaLoad(self.stats()))
            for forwarder in self.forwarders.values():
                if forwarder.link is link:
                    forwarder.tell_progress()
            if loop.time() >= report_at:
                report_at = loop.time() + REPORT_S
                link.send(await self.report())
            await asyncio.sleep(LOAD_S)

    @property
    def _block_tokens(self) -> int:
        return self._llm.config.resources.block_size
