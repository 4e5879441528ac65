"""Workloads for any OpenAI-compatible server: how the sides take turns, and what is kept when one of them fails."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from cllm_bench.client import Client, ServerGoneError
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, Metrics, Run
from cllm_bench.measures import measure, with_common
from cllm_bench.peers import LLAMA_SERVER, Needs, start_llama_server
from cllm_bench.prompts import Prompts
from cllm_bench.servers import Server, already_running, start_cllm
from cllm_bench.watch import Watcher
from cllm_bench.workloads.base import Keep, Setup, Workload, busy_at_rest

INTERRUPTED = "it was interrupted"


class HttpWorkload(Workload):
    """Every pass starts a fresh server and has prompts of its own, so none profits from the pass before."""

    over_http = True

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What a server must have room for."""

    @abstractmethod
    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        """Do the work once, against a warm server that has seen none of these prompts.

        What comes back are the figures of this work alone; those that all have are made of the client's answers.
        """

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
        async with self._server(setup, side) as server, Client(server.url, api_key=key) as client:
            await warm_up(client, setup.prompts("warm-up"))
            one = Pass(side, repeat, server, client, Watcher(client, server.pid))
            one.facts["busy_percent_before"] = await busy_at_rest()
            own: Metrics = {}
            partial: str | None = None
            try:
                async with one.watcher, setup.view.following(client, one.watcher):
                    own = await self.drive(client, setup.prompts(f"{self.title} {repeat}"))
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
            return start_cllm(setup.model, setup.threads, setup.backend, setup.settings)
        if side == LLAMA_SERVER:
            return start_llama_server(setup.model_file, setup.threads, self.needs)
        return already_running(side)


@dataclass(slots=True)
class Pass:
    """One pass while it runs, and what becomes of it."""

    side: str
    repeat: int
    server: Server
    client: Client
    watcher: Watcher
    facts: dict[str, Any] = field(default_factory=dict)

    def run(self, own: Metrics, partial: str | None) -> Run:
        answers = self.client.answers
        failed = [answer.error for answer in answers if answer.error is not None]
        if failed:
            self.facts["first_error"] = failed[0]
            if len(failed) == len(answers):
                partial = partial or f"every request failed: {failed[0]}"
        metrics = measure(answers, self.watcher.samples) | own
        facts = {**self.server.facts, **self.facts}
        return Run(self.side, self.repeat, metrics, facts, answers, self.watcher.samples, partial=partial)


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
