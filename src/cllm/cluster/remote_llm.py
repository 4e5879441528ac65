"""`RemoteLLM`: an `AsyncLLM` whose engines are the replicas of a cluster. The server cannot tell the difference."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cllm.cluster.dispatcher import Dispatcher
from cllm.cluster.peers import Peer, Peers
from cllm.cluster.routing_view import RoutingView, share_view
from cllm.config import Config
from cllm.engine.request import FinishReason, Request
from cllm.engine.row_sampler import RowSampler
from cllm.engine.stats import EngineSnapshot
from cllm.engine.views import EngineView
from cllm.errors import ModelUnavailableError, ShuttingDownError
from cllm.generation import Generation
from cllm.kv.events import Listener
from cllm.kv.pins import LostPin
from cllm.llm import AsyncLLM
from cllm.loading.facts import ModelFacts
from cllm.loading.text_parts import load_text_parts

log = logging.getLogger("cllm.cluster")

FACTS_S = 0.25
"""How often to ask for a replica with the right settings."""


class RemoteLLM(AsyncLLM):
    """Tokenises, renders and detokenises here; everything else happens on replicas."""

    def __init__(
        self, config: Config, replicas: Any, *, deployment: str | None = None, version: str | None = None
    ) -> None:
        """`replicas`: Ray Serve's handle. `deployment`: its name of them, if the model's is not unique. `version`: of
        their settings; during an update there are replicas of others, too."""
        super().__init__(config)
        self._replicas = replicas
        self._deployment = deployment or config.model.name
        self._version = version
        self._dispatcher: Dispatcher | None = None
        self._peers: Peers | None = None

    @property
    def peers(self) -> Sequence[Peer]:
        """Replicas with a link."""
        return [] if self._peers is None else list(self._peers.connected.values())

    @property
    def hosts(self) -> Mapping[str, str]:
        """The machines of all replicas that Ray knows, by replica."""
        return {} if self._peers is None else {name: address.host for name, address in self._peers.known.items()}

    # -- lifecycle ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        settings = self.config.cluster
        ingress = uuid.uuid4().hex[:12]
        view = RoutingView(self.config.resources.block_size)
        share_view(self._deployment, view)
        facts = await self._ask_facts()
        self._text = await asyncio.to_thread(load_text_parts, self.config, facts)
        self._dispatcher = Dispatcher(
            ingress,
            self._replicas,
            view,
            self._dispatch,
            self.observers,
            weights=facts.weights,
            silence_s=settings.silence_s,
            wait_s=settings.wait_s,
            max_sends=settings.max_sends,
        )
        self._peers = Peers(ingress, view, self._dispatcher, silence_s=settings.silence_s)

    async def _ask_facts(self) -> ModelFacts:
        asked = () if self._version is None else (self._version,)
        facts: ModelFacts | None = None
        while facts is None:
            facts = await self._replicas.facts.remote(*asked)
            if facts is None:
                await asyncio.sleep(FACTS_S)
        return facts

    async def shutdown(self, grace_s: float | None = None) -> None:
        if self._dispatcher is None or self._peers is None:
            return
        self._dispatcher.fail_all(ShuttingDownError("the server shut down before the request finished"))
        await self._peers.close()
        self._dispatcher = None
        if self._text is not None:
            self._text.close()

    def release(self) -> None:
        """There is nothing to free in this process."""

    @property
    def ready(self) -> bool:
        return bool(self.peers)

    # -- requests ----------------------------------------------------------------------------------------------

    def _start_request(self, request: Request) -> None:
        if self._dispatcher is None:
            raise ShuttingDownError("the server is shutting down and accepts no more requests")
        self._dispatcher.start(request)

    async def confirm(self, generations: Iterable[Generation]) -> None:
        for generation in generations:
            if self._dispatcher is not None:
                await self._dispatcher.accepted(generation.request_id)
            if generation.error is not None:
                raise generation.error

    def cancel(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        if self._dispatcher is not None:
            self._dispatcher.cancel(request_id, index, reason)
        if index is None:
            self._live.pop(request_id, None)

    @property
    def _row_sampler(self) -> RowSampler | None:
        return None

    async def unpin(self, name: str, space: bytes | None = None) -> bool:
        return any(await self._ask_all("unpin", name, space))

    async def lost_pins(self) -> list[LostPin]:
        return []  # each replica computes its own again

    async def listen(self) -> Listener | None:
        return None

    async def _ask_all(self, name: str, *arguments: Any) -> list[Any]:
        """The answers of all replicas that give one."""
        answers = await asyncio.gather(*(peer.call(name, *arguments) for peer in self.peers), return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    # -- numbers -----------------------------------------------------------------------------------------------

    def snapshot(self) -> EngineSnapshot:
        reports = [peer.report for peer in self.peers if peer.report is not None]
        if not reports:
            raise ModelUnavailableError("no replica has reported yet", retry_after_s=1.0)
        return reports[0].snapshot

    def kv(self) -> dict[str, Any]:
        return {"replicas": {peer.name: peer.report.kv for peer in self.peers if peer.report is not None}}

    def watch(self) -> None:
        """Replicas report anyway."""

    def unwatch(self) -> None:
        """As `watch`."""

    def view(self) -> EngineView | None:
        return None
