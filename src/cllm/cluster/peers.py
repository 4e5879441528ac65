"""An ingress's side of the links: one to each replica of a model that Ray knows."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cllm.cluster.link import Link, connect
from cllm.cluster.messages import (
    Accepted,
    CacheContent,
    CacheEvents,
    Call,
    Ended,
    Greeting,
    Hello,
    ReplicaLoad,
    ReplicaProgress,
    Reply,
    Report,
)
from cllm.cluster.routing_view import Address, RoutingView
from cllm.cluster.totals import ReplicaState, ReplicaStatus
from cllm.engine.request import Output
from cllm.errors import ModelUnavailableError
from cllm.loading.facts import ModelFacts

if TYPE_CHECKING:
    from cllm.cluster.dispatcher import Dispatcher

log = logging.getLogger("cllm.cluster")

RECONNECT_S = 0.25
WATCH_S = 0.25


class Peer:
    """A replica with a link. `report` is its latest."""

    def __init__(self, hello: Hello, link: Link) -> None:
        self.name = hello.replica
        self.facts = hello.facts
        self.pid = hello.pid
        self.draining = False
        """Whether Ray has stopped giving it out: it finishes what it has."""
        self.link = link
        self.report: Report | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    async def call(self, name: str, *arguments: Any) -> Any:
        """One of the replica's calls (`LinkServer.calls`)."""
        number = next(self._numbers)
        self._calls[number] = future = asyncio.get_running_loop().create_future()
        self.link.send(Call(number, name, arguments))
        try:
            return await future
        finally:
            self._calls.pop(number, None)

    def on_reply(self, reply: Reply) -> None:
        future = self._calls.get(reply.number)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(reply.error)
        else:
            future.set_result(reply.value)

    def lose(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ModelUnavailableError(f"the replica {self.name} is gone", retry_after_s=1.0))


class Peers:
    def __init__(
        self,
        ingress: str,
        view: RoutingView,
        dispatcher: Dispatcher,
        facts: ModelFacts,
        *,
        silence_s: float,
        accept_context: Callable[[int], bool] = lambda tokens: False,
    ) -> None:
        """`facts`: of the served model. `silence_s`: a replica that says nothing for this long counts as lost.
        `accept_context` is asked to lower the server's context to that of a replica which holds less."""
        self._ingress = ingress
        self._view = view
        self._dispatcher = dispatcher
        self._facts = facts
        self._silence_s = silence_s
        self._accept_context = accept_context
        self._loop = asyncio.get_running_loop()
        self._linking: dict[str, asyncio.Task[None]] = {}
        self.known: dict[str, Address] = {}
        """All replicas that Ray knows."""
        self.connected: dict[str, Peer] = {}
        view.follow(self._on_replicas)

    def _on_replicas(self, replicas: Mapping[str, Address]) -> None:
        """In Ray's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._follow, replicas)

    def _follow(self, replicas: Mapping[str, Address]) -> None:
        for name in self._linking.keys() - replicas.keys():
            # It may be draining: its link stays until it closes, and only new jobs go elsewhere.
            if name not in self.connected:
                self._linking.pop(name).cancel()
        for name, address in replicas.items():
            if name not in self._linking or self._linking[name].done():
                self._linking[name] = asyncio.create_task(self._keep_link(name, address))
        self.known = dict(replicas)
        for peer in self.connected.values():
            peer.draining = peer.name not in replicas

    async def _keep_link(self, name: str, address: Address) -> None:
        """For as long as Ray knows the replica."""
        while True:
            try:
                link = await connect(*address)
            except OSError as error:
                log.debug("no link to replica %s: %s", name, error)
            else:
                try:
                    await self._use(link)
                except Exception:  # a message that cannot be read: the replica may be another version
                    log.exception("the link to replica %s broke", name)
            await asyncio.sleep(RECONNECT_S)
            if name not in self.known:
                self._linking.pop(name, None)
                return

    async def _use(self, link: Link) -> None:
        link.send(Greeting(self._ingress))
        peer: Peer | None = None
        watching = asyncio.create_task(self._watch(link))
        try:
            async for messages in link.messages():
                for message in messages:
                    if isinstance(message, Hello):
                        peer = self._welcome(message, link)
                    elif peer is not None:
                        self._take(peer, message)
        finally:
            watching.cancel()
            link.close()
            if peer is not None and self.connected.get(peer.name) is peer:
                self._lose(peer)

    def _welcome(self, hello: Hello, link: Link) -> Peer:
        peer = self.connected[hello.replica] = Peer(hello, link)
        facts = peer.facts
        tells_cache = hello.block_tokens > 0
        self._view.add(peer.name, facts.weights, tells_cache=tells_cache, max_context=facts.max_context)
        if problem := self._misfit(facts):
            log.warning("replica %s gets no requests: %s", peer.name, problem)
        else:
            log.info("replica %s joined", peer.name)
        return peer

    def _misfit(self, facts: ModelFacts) -> str | None:
        """Why it cannot stand in for the others."""
        if facts.weights != self._facts.weights:
            return "its model file is another one than this server was started with; restart the cluster"
        if facts.max_context < self._facts.max_context:
            if self._accept_context(facts.max_context):
                self._facts = replace(self._facts, max_context=facts.max_context)
                return None
            return (
                f"it has memory for sequences of {facts.max_context} tokens, others of {self._facts.max_context}; "
                f"set resources.max_context_length to {facts.max_context}"
            )
        return None

    def _lose(self, peer: Peer) -> None:
        del self.connected[peer.name]
        self._view.remove(peer.name)
        log.info("replica %s left", peer.name)
        peer.lose()
        self._dispatcher.on_lost(peer)

    async def _watch(self, link: Link) -> None:
        """Close a link on which nothing comes: its replica hangs, or its machine is gone."""
        while True:
            await asyncio.sleep(WATCH_S)
            if time.monotonic() - link.heard_at > self._silence_s:
                await asyncio.sleep(WATCH_S)  # this process may have been the one that was held up
                if time.monotonic() - link.heard_at > self._silence_s:
                    log.warning("a replica has been silent for %.3g s; its requests go elsewhere", self._silence_s)
                    link.close()
                    return

    def _take(self, peer: Peer, message: Any) -> None:
        match message:
            case Output():
                self._dispatcher.on_output(peer, message)
            case Accepted():
                self._dispatcher.on_accepted(peer, message)
            case ReplicaProgress():
                self._dispatcher.on_progress(peer, message)
            case Ended():
                self._dispatcher.on_ended(peer, message)
            case CacheEvents(events):
                self._view.apply(peer.name, events)
            case CacheContent(number, names):
                self._view.take_content(peer.name, number, names)
            case ReplicaLoad(stats):
                self._view.report(peer.name, stats)
            case Report():
                peer.report = message
            case Reply():
                peer.on_reply(message)

    def statuses(self) -> list[ReplicaStatus]:
        """The statuses of all replicas that Ray knows or that have a link, in the order of their names."""
        return [self._status(name) for name in sorted(self.known.keys() | self.connected.keys())]

    def _status(self, name: str) -> ReplicaStatus:
        peer = self.connected.get(name)
        if peer is None:
            return ReplicaStatus(name, self.known[name].host, None, "joining", None)
        return ReplicaStatus(name, peer.link.host, peer.pid, self._state(peer), peer.report)

    def _state(self, peer: Peer) -> ReplicaState:
        if peer.name not in self.known:
            return "draining"
        if peer.report is None:
            return "joining"
        return "silent" if self._view.is_silent(peer.name) else "running"

    async def close(self) -> None:
        self._view.follow(lambda replicas: None)
        tasks = list(self._linking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
