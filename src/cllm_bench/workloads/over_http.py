"""Workloads for any OpenAI-compatible server: how the sides take turns, and what is kept when one of them fails."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cllm_bench.bandwidth import PerfCounter, bytes_read
from cllm_bench.client import Client, ServerGoneError
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, Metrics, Run
from cllm_bench.measures import measure, with_common
from cllm_bench.peers import PEERS
from cllm_bench.peers.base import Needs
from cllm_bench.prompts import Prompts
from cllm_bench.servers import Server, already_running, start_cllm
from cllm_bench.watch import Watcher
from cllm_bench.workloads.base import Keep, Setup, Workload, busy_at_rest

INTERRUPTED = "it was interrupted"


class HttpWorkload(Workload):
    """Every pass starts a fresh server and has prompts of its own, so none profits from the pass before."""

    over_http = True
    cllm_settings: ClassVar[Mapping[str, Any]] = {}
    """What cLLM needs for this work beside its defaults."""

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What a server must have room for."""

    @abstractmethod
    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        """Do the work once, against a warm server that has seen none of these prompts.

        What comes back are the figures of this work alone; those that all have are made of the client's answers.
        """

    def trends(self, watcher: Watcher, client: Client) -> Metrics:
        """Figures that need what was sampled beside the load."""
        return {}

    @property
    def all_figures(self) -> Sequence[Figure]:
        return with_common(self.figures)

    async def measure(self, setup: Setup, keep: Keep) -> None:
        broken: set[str] = set()
        for repeat in range(setup.repeats):
            for side in setup.sides(repeat):
                if side in broken:
                    continue
                setup.view.say(f"{self.title}: {setup.shown(side)}, {repeat + 1} of {setup.repeats}")
                try:
                    await self.one_pass(setup, side, repeat, keep)
                except BenchError as error:  # it did not start, or failed while warming up
                    keep(Run(side, repeat, {}, partial=str(error)))
                    broken.add(side)

    async def one_pass(self, setup: Setup, side: str, repeat: int, keep: Keep) -> None:
        """Keeps one run, also if the server dies or the user has had enough: then it is marked as partial."""
        key = setup.api_key if side == OURS else None
        async with self._server(setup, side) as server, Client(server.url, api_key=key, extra=server.extra) as client:
            await warm_up(client, setup.prompts("warm-up"))
            one = Pass(setup, side, repeat, server, client, Watcher(client, server.pid), PerfCounter(server.pid))
            one.facts["busy_percent_before"] = await busy_at_rest()
            own: Metrics = {}
            partial: str | None = None
            try:
                async with one.perf, one.watcher, setup.view.following(client, one.watcher):
                    own = await self.drive(client, setup.prompts(f"{self.title} {repeat}"))
                own |= self.trends(one.watcher, client)
            except ServerGoneError as error:
                partial = str(error)
            except (asyncio.CancelledError, KeyboardInterrupt):
                keep(one.run(own, INTERRUPTED))
                raise
            keep(one.run(own, partial))

    def _server(self, setup: Setup, side: str) -> AbstractAsyncContextManager[Server]:
        if side == OURS:
            if setup.url is not None:
                return already_running(setup.url)
            if setup.running is not None:
                return nullcontext(setup.running)
            return start_cllm(setup.model, setup.threads, setup.backend, {**self.cllm_settings, **setup.settings})
        if side not in PEERS:
            return already_running(side)
        peer = PEERS[side]
        settings = setup.peer_settings or peer.candidates(self.needs)[0]
        return peer.start(setup.model_file, setup.threads, settings)


@dataclass(slots=True)
class Pass:
    """One pass while it runs, and what becomes of it."""

    setup: Setup
    side: str
    repeat: int
    server: Server
    client: Client
    watcher: Watcher
    perf: PerfCounter
    facts: dict[str, Any] = field(default_factory=dict)

    def run(self, own: Metrics, partial: str | None) -> Run:
        answers = self.client.answers
        failed = [answer.error for answer in answers if answer.error is not None]
        if failed:
            self.facts["first_error"] = failed[0]
            if len(failed) == len(answers):
                partial = partial or f"every request failed: {failed[0]}"
        metrics = measure(answers, self.watcher.samples, self.setup.targets) | own
        metrics |= self._bandwidth(metrics.get("seconds", 0.0))
        facts = {**self.server.facts, **self.facts}
        return Run(self.side, self.repeat, metrics, facts, answers, self.watcher.samples, partial=partial)

    def _bandwidth(self, seconds: float) -> Metrics:
        metrics: Metrics = {}
        if not seconds:
            return metrics
        steps, per_token = self.watcher.steps, self.watcher.kv_bytes_per_token
        runs_model = self.server.facts.get("backend", "fake") != "fake"
        if steps and per_token and runs_model and self.setup.url is None:
            weights = self.setup.model_file.stat().st_size
            metrics["read_gb_per_s"] = bytes_read(self.client.answers, steps, weights, per_token) / seconds / 1e9
        if self.perf.bytes is not None:
            metrics["perf_gb_per_s"] = self.perf.bytes / seconds / 1e9
        elif self.perf.why_not:
            self.facts["perf"] = f"not available: {self.perf.why_not}"
        return metrics


@asynccontextmanager
async def warm_cllm(
    setup: Setup, settings: Mapping[str, Any], backend: str | None = None
) -> AsyncIterator[tuple[Server, Client]]:
    """A server that has answered its first requests, and a client of it."""
    async with (
        start_cllm(setup.model, setup.threads, backend or setup.backend, settings) as server,
        Client(server.url) as client,
    ):
        await warm_up(client, setup.prompts("warm-up"))
        yield server, client


async def warm_up(client: Client, prompts: Prompts) -> None:
    """Touch every path once: a short prompt, a longer one, the chat template. None of it is measured."""
    await client.complete(prompts.text(8), 4)
    await client.complete(prompts.text(96), 4)
    await client.chat([{"role": "user", "content": prompts.text(8)}], 4)
    failed = client.first_error
    client.answers.clear()
    if failed:
        raise BenchError(f"{client.address.url} fails at the first requests: {failed}")
