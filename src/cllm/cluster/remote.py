"""`RemoteExecutor`: the replicas of a cluster compute what an ingress has prepared."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cllm.cluster.collector import ClusterCollector, replica_families
from cllm.cluster.dispatcher import Dispatcher
from cllm.cluster.everywhere import results, together
from cllm.cluster.messages import Report
from cllm.cluster.peers import Peer, Peers
from cllm.cluster.routing_view import RoutingView, share_view
from cllm.cluster.totals import ReplicaStatus, total_details, total_snapshot
from cllm.cluster.views import ViewSource, replica_line
from cllm.config import Config
from cllm.engine.observer import Deliver, Observers
from cllm.engine.request import FinishReason, Request
from cllm.engine.stats import EngineSnapshot, EngineView
from cllm.engine.submission import Submission
from cllm.errors import CLLMError, ConfigError, ModelUnavailableError, ShuttingDownError
from cllm.executor import Warm, kv_report
from cllm.kv.events import Listener
from cllm.kv.pins import LostPin, WarmResult
from cllm.loading.context import ENOUGH_TOKENS
from cllm.loading.facts import ModelFacts
from cllm.loading.text_model import TextModel
from cllm.observe.router_metrics import RouterMetrics
from cllm.work.pool import Workers

log = logging.getLogger("cllm.cluster")

REPORT_S = 1.0
"""How long to wait for a replica's numbers; after that, its latest ones are shown."""

FACTS_S = 0.25
"""How often to ask for a replica with the right settings."""


class RemoteExecutor:
    """An `Executor`. Text becomes tokens and tokens text here; everything else happens on replicas."""

    rows = None
    """Replicas sample."""

    def __init__(
        self, config: Config, replicas: Any, *, deployment: str | None = None, version: str | None = None
    ) -> None:
        """`replicas`: Ray Serve's handle. `deployment`: its name of them, if the model's is not unique. `version`: of
        their settings; during an update there are replicas of others, too."""
        self.observers = Observers()
        self.text: TextModel | None = None
        self._config = config
        self._replicas = replicas
        self._deployment = deployment or config.model.name
        self._version = version
        self._dispatcher: Dispatcher | None = None
        self._peers: Peers | None = None
        self._routing: RoutingView | None = None
        self._views = ViewSource()
        self._router_metrics = RouterMetrics(
            config.server.metrics_prefix,
            replicas=lambda: Counter(status.state for status in self.statuses()),
            index_blocks=lambda: 0 if self._routing is None else self._routing.index_blocks,
            streams=lambda: self.streams,
        )

    @property
    def streams(self) -> int:
        """Requests that have not ended."""
        return 0 if self._dispatcher is None else self._dispatcher.streams

    @property
    def peers(self) -> Sequence[Peer]:
        """Replicas with a link."""
        return [] if self._peers is None else list(self._peers.connected.values())

    # -- lifecycle ---------------------------------------------------------------------------------------------

    async def start(self, workers: Workers, deliver: Deliver, on_pins_lost: Callable[[], None]) -> None:
        settings = self._config.cluster
        ingress = uuid.uuid4().hex[:12]
        view = RoutingView(self._config.resources.block_size, settings.routing, alone=settings.ingresses == 1)
        self._routing = view
        share_view(self._deployment, view)
        facts = await self._ask_facts()
        self.text = await asyncio.to_thread(TextModel.load, self._config, facts, workers)
        self._dispatcher = Dispatcher(
            ingress,
            self._replicas,
            view,
            deliver,
            self.observers,
            self._router_metrics,
            weights=facts.weights,
            silence_s=settings.silence_s,
            wait_s=settings.wait_s,
            max_sends=settings.max_sends,
        )
        self._peers = Peers(
            ingress,
            view,
            self._dispatcher,
            facts,
            silence_s=settings.silence_s,
            accept_context=self._accept_context,
        )

    def _accept_context(self, tokens: int) -> bool:
        """Where nobody set the context, machines with different memory have different ones, and the smallest counts."""
        if self.text is None or self._config.resources.max_context_length is not None or tokens < ENOUGH_TOKENS:
            return False
        try:
            self.text.lower_context(tokens)
        except ConfigError:
            return False
        log.info("context: %s tokens, as many as the new replica has memory for", f"{tokens:,}")
        return True

    async def _ask_facts(self) -> ModelFacts:
        asked = () if self._version is None else (self._version,)
        facts: ModelFacts | None = None
        while facts is None:
            facts = await self._replicas.facts.remote(*asked)
            if facts is None:
                await asyncio.sleep(FACTS_S)
        return facts

    async def stop(self, grace_s: float) -> None:
        if self._dispatcher is None or self._peers is None:
            return
        self._dispatcher.fail_all(ShuttingDownError("the server shut down before the request finished"))
        await self._peers.close()
        self._dispatcher = None
        if self.text is not None:
            self.text.close()

    def release(self, *, mute: bool = False) -> None:
        """There is nothing to free in this process."""

    @property
    def ready(self) -> bool:
        return bool(self.peers)

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self._running.start(request)

    async def accepted(self, request_id: str) -> None:
        if self._dispatcher is not None:
            await self._dispatcher.accepted(request_id)

    def cancel(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        if self._dispatcher is not None:
            self._dispatcher.cancel(request_id, index, reason)

    async def everywhere(self, submission: Submission, warm: Warm) -> WarmResult:
        """Raises `ModelUnavailableError` with the replicas it failed on, if it did not on all."""
        names = [peer.name for peer in self.peers]
        if not names:
            raise self._no_replica()
        given = submission.request_id or f"warm-{uuid.uuid4().hex}"
        ids = [given] if len(names) == 1 else [f"{given}-{number}" for number in range(len(names))]
        each = [replace(submission, request_id=id, replica=name) for id, name in zip(ids, names, strict=True)]
        answers = await asyncio.gather(*map(warm, each), return_exceptions=True)
        return together(results(dict(zip(names, answers, strict=True)), "the prefix is cached"))

    async def unpin(self, name: str, space: bytes | None = None) -> bool:
        """From every replica that has it. Raises `ModelUnavailableError` with those that did not answer."""
        peers = self.peers
        if not peers:
            raise self._no_replica()
        answers = await asyncio.gather(*(peer.call("unpin", name, space) for peer in peers), return_exceptions=True)
        names = [peer.name for peer in peers]
        return any(results(dict(zip(names, answers, strict=True)), "the pin is removed").values())

    async def lost_pins(self) -> list[LostPin]:
        return []  # each replica computes its own again

    async def listen(self) -> Listener | None:
        return None

    # -- numbers -----------------------------------------------------------------------------------------------

    def statuses(self) -> list[ReplicaStatus]:
        """The statuses of all replicas."""
        return [] if self._peers is None else self._peers.statuses()

    async def refresh(self) -> None:
        await asyncio.gather(*map(self._refresh, self.peers))

    async def _refresh(self, peer: Peer) -> None:
        with suppress(CLLMError, asyncio.TimeoutError):
            peer.report = await asyncio.wait_for(peer.call("report"), REPORT_S)

    def snapshot(self) -> EngineSnapshot:
        return total_snapshot([(status.node, report.snapshot) for status, report in self._reports()])

    def kv(self) -> dict[str, Any]:
        reports = self._reports()
        details = total_details({status.name: report.kv["details"] for status, report in reports})
        replicas = {
            status.name: {
                "node": status.node,
                "pid": status.pid,
                "state": status.state,
                **({} if status.report is None else status.report.kv),
            }
            for status in self.statuses()
        }
        assert self.text is not None  # it is there before any report
        return {**kv_report(self.snapshot(), details, self.text.facts), "replicas": replicas}

    def replicas(self) -> list[dict[str, Any]] | None:
        return [replica_line(status) for status in self.statuses()]

    def watch(self) -> None:
        """Replicas report anyway. Raises if there is none."""
        self._reports()

    def unwatch(self) -> None:
        """As `watch`."""

    def view(self) -> EngineView | None:
        requests = self._running.requests
        return self._views.view(requests, self._reports()[0][1].snapshot.kv)

    def metrics(self, prefix: str) -> Collector:
        return ClusterCollector([partial(self.metric_families, prefix)])

    def metric_families(self, prefix: str) -> Iterator[Metric]:
        yield from self._router_metrics.collect()
        name = "" if self.text is None else self.text.name
        for status in self.statuses():
            if status.report is not None:
                yield from replica_families(prefix, name, status.name, status.report)

    @property
    def _running(self) -> Dispatcher:
        if self._dispatcher is None:
            raise ShuttingDownError("the server is shutting down and accepts no more requests")
        return self._dispatcher

    def _reports(self) -> list[tuple[ReplicaStatus, Report]]:
        """At least one; raises `ModelUnavailableError` if there is none."""
        statuses = self.statuses()
        reports = [(status, status.report) for status in statuses if status.report is not None]
        if not reports:
            raise self._no_replica()
        return reports

    def _no_replica(self) -> ModelUnavailableError:
        joining = len(self.statuses())
        why = (
            f"no replica is available yet: {joining} joining" if joining else "no replica is available; try again later"
        )
        return ModelUnavailableError(why, retry_after_s=1.0)
