"""Replicas are killed under load: is a request lost or answered wrong, and how long do the streams pause?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter

from cllm_bench.client import Client
from cllm_bench.clusters import kill, replica_pids, start_cluster
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.prompts import Prompts
from cllm_bench.response import TimedResponse
from cllm_bench.stats import percentile
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest

_FEWEST = 2
"""Replicas that must be there for one to be killed."""
_PAUSE_STEPS = 4
"""A gap of so many steps around a kill is a pause."""


@dataclass(frozen=True)
class ClusterLosses(LocalWorkload):
    """Each client has one prompt and asks it again and again: what it is told before the first kill is the right answer
    ever after. Ray replaces the replicas that were killed."""

    replicas: int = 4
    clients: int = 16
    kills: int = 12
    every_s: float = 3.0
    step_ms: float = 40.0
    prompt_tokens: int = 400
    answer_tokens: int = 60

    name = "cluster-losses"
    needs_model = False
    figures = (
        Figure("lost", "requests lost or wrong", "", limit=own(0.0), format=",.0f"),
        Figure("pause_p50_ms", "pause of streams that lost their replica, P50", "ms", limit=own(500.0)),
        Figure("pause_p99_ms", "pause of streams that lost their replica, P99", "ms"),
        Figure("paused", "streams that lost their replica", "", format=",.0f", compared=False),
        Figure("requests", "requests", "", "higher", format=",.0f", compared=False),
        Figure("first_ms", "first token while nothing is killed, P50", "ms"),
    )

    @property
    def title(self) -> str:
        return (
            f"cluster-losses: {self.replicas} replicas, {self.clients} clients, steps of {self.step_ms:g} ms, "
            f"{self.kills} kills, one every {self.every_s:g} s"
        )

    def quick(self) -> ClusterLosses:
        return replace(self, replicas=2, clients=4, kills=1)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        settings = {"backend.fake.latency_ms": self.step_ms}
        async with start_cluster(self.replicas, settings) as cluster, Client(cluster.url) as client:
            facts = {"busy_percent_before": await busy_at_rest()}
            metrics = await self._drive(client, setup.prompts(f"{self.name} {repeat}"))
        return [Run(OURS, repeat, metrics, facts, client.answers)]

    async def _drive(self, client: Client, prompts: Prompts) -> Metrics:
        texts = [prompts.rough(self.prompt_tokens) for _ in range(self.clients)]
        right = await asyncio.gather(*(client.complete(text, self.answer_tokens) for text in texts))
        client.raise_for_errors()
        killing = asyncio.create_task(self._kill_some(client, prompts))
        answers = await asyncio.gather(*(self._ask_until(killing, client, text) for text in texts))
        kills = await killing
        lost = sum(
            answer.error is not None or answer.text != first.text
            for first, later in zip(right, answers, strict=True)
            for answer in later
        )
        everything = [answer for later in answers for answer in later]
        pauses = self._pauses(kills, everything)
        return {
            "lost": float(lost),
            "requests": float(len(everything)),
            "paused": float(len(pauses)),
            "first_ms": percentile([each.ttft for each in right], 50) * 1e3,
        } | ({f"pause_p{percent}_ms": percentile(pauses, percent) * 1e3 for percent in (50, 99)} if pauses else {})

    async def _ask_until(self, killing: asyncio.Task[list[float]], client: Client, text: str) -> list[TimedResponse]:
        answers = []
        while not killing.done():
            answers.append(await client.complete(text, self.answer_tokens))
        return answers

    async def _kill_some(self, client: Client, prompts: Prompts) -> list[float]:
        """When each of the kills happened."""
        moments: list[float] = []
        killed: set[int] = set()
        while len(moments) < self.kills:
            await asyncio.sleep(self.every_s)
            alive = sorted(set((await replica_pids(client.address)).values()) - killed)
            if len(alive) >= _FEWEST:
                killed.add(victim := prompts.random.choice(alive))
                kill(victim)
                moments.append(perf_counter())
        await asyncio.sleep(self.every_s)
        return moments

    def _pauses(self, kills: Sequence[float], answers: Sequence[TimedResponse]) -> list[float]:
        """The long gap of each stream in which a replica was killed."""
        shortest = _PAUSE_STEPS * self.step_ms / 1e3
        return [
            later - sooner
            for answer in answers
            for sooner, later in pairwise(answer.arrivals)
            if later - sooner >= shortest and any(sooner <= moment <= later for moment in kills)
        ]
