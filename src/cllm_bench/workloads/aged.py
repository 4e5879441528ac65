"""A server that has answered thousands of requests beside a fresh one: is request 10,000 as fast as request 1?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Any

from cllm_bench.client import Client
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.load import at_most
from cllm_bench.measures import latencies
from cllm_bench.response import TimedResponse
from cllm_bench.servers import Server
from cllm_bench.stats import percent_more
from cllm_bench.watch import Sample, Watcher
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest
from cllm_bench.workloads.mixed import Mixed
from cllm_bench.workloads.over_http import warm_cllm

FRESH = "a fresh server"

REST_S = 0.03
"""Before each request, so that the other server's threads have gone to sleep."""

_SMALL = {"resources.max_context_length": 2048, "resources.kv_cache_max_memory_mb": 512}

PEOPLE = Mixed(duration=inf, prompt_tokens=24, prompt_most=200, answer_tokens=4, answer_most=16)
"""The traffic while the server ages: much as on a usual day, but brief, so that thousands of requests take minutes."""


@dataclass(frozen=True)
class Aged(LocalWorkload):
    """Thousands of people come to one server, some leave early, and its cache is overwritten many times. Then a fresh
    server starts, and both answer the same questions in turn. What differs is their age, not the machine's mood.
    """

    requests: int = 10_000
    at_a_time: int = 8
    rounds: int = 100
    prompt_tokens: int = 100
    answer_tokens: int = 32

    name = "aged"
    figures = (
        Figure("slower_percent", "slower than a fresh server", "%", limit=own(2.0)),
        Figure("first_slower_percent", "the same, to the first token", "%"),
        Figure("request_p50_ms", "whole request, P50", "ms"),
        Figure("ttft_p50_ms", "first token, P50", "ms"),
        Figure("inter_token_p50_ms", "between tokens, P50", "ms"),
    )

    @property
    def title(self) -> str:
        return (
            f"aged: a server that has answered {self.requests:,} people beside a fresh one, "
            f"{self.prompt_tokens} tokens in, {self.answer_tokens} out, {self.rounds} rounds in turn"
        )

    def quick(self) -> Aged:
        return replace(self, requests=50, rounds=4, prompt_tokens=16, answer_tokens=4)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        async with AsyncExitStack() as servers:
            server, old = await _start(setup, servers)
            samples = await self._age(setup, server, old, repeat)
            _, fresh = await _start(setup, servers)
            facts: dict[str, Any] = {**server.facts, "busy_percent_before": await busy_at_rest()}
            await self._compare(setup, old, fresh, repeat)
        ours = latencies(old.answers) | slower(old.answers, fresh.answers)
        return [
            Run(OURS, repeat, ours, facts, old.answers, samples),
            Run(FRESH, repeat, latencies(fresh.answers), answers=fresh.answers),
        ]

    async def _age(self, setup: Setup, server: Server, client: Client, repeat: int) -> Sequence[Sample]:
        people = islice(PEOPLE.arrivals(setup.prompts(f"{self.name} {repeat}")), self.requests)
        watcher = Watcher(client, server.pid)
        async with watcher, setup.view.following(client, watcher):
            await at_most(self.at_a_time, [person.visit(client) for person in people])
        client.raise_for_errors()
        client.answers.clear()
        return watcher.samples

    async def _compare(self, setup: Setup, old: Client, fresh: Client, repeat: int) -> None:
        prompts = setup.prompts(f"{self.name} rounds {repeat}")
        for number in range(self.rounds):
            text = prompts.text(self.prompt_tokens)
            # The order alternates, so that a drift of the machine hits both alike.
            for client in (old, fresh) if number % 2 == 0 else (fresh, old):
                await asyncio.sleep(REST_S)
                await client.complete(text, self.answer_tokens)
        old.raise_for_errors()
        fresh.raise_for_errors()


async def _start(setup: Setup, stack: AsyncExitStack) -> tuple[Server, Client]:
    """A warm server in a cache that is soon full, so that most of the time is spent evicting and reusing."""
    return await stack.enter_async_context(warm_cllm(setup, {**_SMALL, **setup.settings}))


def slower(old: Sequence[TimedResponse], fresh: Sequence[TimedResponse]) -> Metrics:
    """How much longer the old server takes than the fresh one, in percent, with the interval over the rounds."""
    pairs = list(zip(old, fresh, strict=True))
    return {
        **percent_more("slower_percent", [one.seconds / other.seconds for one, other in pairs]),
        **percent_more("first_slower_percent", [one.ttft / other.ttft for one, other in pairs]),
    }
