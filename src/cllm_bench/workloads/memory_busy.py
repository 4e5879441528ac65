"""KV compaction all the time and never: do streams notice?"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from statistics import median
from typing import Any

from cllm_bench.client import Client
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.load import at_most
from cllm_bench.measures import latencies, totals
from cllm_bench.response import TimedResponse
from cllm_bench.servers import Server
from cllm_bench.stats import percent_more, percentile
from cllm_bench.workloads.base import SETTLE_S, LocalWorkload, Setup, busy_at_rest
from cllm_bench.workloads.mixed import Arrival, Mixed
from cllm_bench.workloads.over_http import warm_cllm

NEVER_MOVED = "compaction off"
COMPACTION = "kv.compaction"

PEOPLE = Mixed(duration=inf, prompt_tokens=60, prompt_most=600, answer_tokens=60, answer_most=256, leave_share=0.05)
"""Short and long ones, so that what they leave behind is of all sizes."""


@dataclass(frozen=True)
class MemoryBusy(LocalWorkload):
    """Two servers that differ in one setting get the same people in turn, in a cache that is full."""

    streams: int = 16
    rounds: int = 8
    people: int = 48
    """Per round."""
    memory_mb: int = 256

    name = "memory-busy"
    figures = (
        Figure("p99_more_percent", "between tokens, P99, more than without", "%", limit=own(5.0)),
        Figure("p50_more_percent", "the same, P50", "%"),
        Figure("inter_token_p50_ms", "between tokens, P50", "ms"),
        Figure("inter_token_p99_ms", "between tokens, P99", "ms"),
        Figure("ttft_p50_ms", "first token, P50", "ms"),
        Figure("tokens_per_s", "tokens out", "tok/s", "higher"),
        Figure("moved_mb", "moved", "MB", "higher"),
    )

    @property
    def title(self) -> str:
        return (
            f"memory-busy: {self.streams} streams, blocks moved all the time beside never, "
            f"{self.rounds} rounds of {self.people} people in turn"
        )

    def quick(self) -> MemoryBusy:
        return replace(self, streams=4, rounds=2, people=6, memory_mb=64)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        async with AsyncExitStack() as stack:
            moving = await self._start(setup, stack, "always")
            resting = await self._start(setup, stack, "off")
            facts: dict[str, Any] = {**moving.server.facts, "busy_percent_before": await busy_at_rest()}
            people = PEOPLE.arrivals(setup.prompts(f"{self.name} {repeat}"))
            await self._round(moving, resting, list(islice(people, self.people)))  # fills both caches; not counted
            for side in (moving, resting):
                side.rounds.clear()
                side.moved_before = await _moved_bytes(side.client)
            for number in range(self.rounds):
                setup.view.say(f"{self.title}: round {number + 1}")
                order = (moving, resting) if number % 2 == 0 else (resting, moving)
                await self._round(*order, list(islice(people, self.people)))
            ours, theirs = await moving.metrics(), await resting.metrics()
        for percent in (50, 99):
            ours |= percent_more(f"p{percent}_more_percent", _gap_ratios(moving.rounds, resting.rounds, percent))
        return [
            Run(OURS, repeat, ours, facts, moving.answers),
            Run(NEVER_MOVED, repeat, theirs, answers=resting.answers),
        ]

    async def _start(self, setup: Setup, stack: AsyncExitStack, compaction: str) -> _Side:
        settings = {
            "resources.kv_cache_max_memory_mb": self.memory_mb,
            "resources.max_context_length": 2048,
            **setup.settings,
            COMPACTION: compaction,
        }
        return _Side(*await stack.enter_async_context(warm_cllm(setup, settings)))

    async def _round(self, first: _Side, second: _Side, people: Sequence[Arrival]) -> None:
        for side in (first, second):
            await asyncio.sleep(SETTLE_S)
            await at_most(self.streams, [person.visit(side.client) for person in people])
            side.end_round()


@dataclass(slots=True)
class _Side:
    server: Server
    client: Client
    rounds: list[list[TimedResponse]] = field(default_factory=list)
    moved_before: float = 0.0

    def end_round(self) -> None:
        self.client.raise_for_errors()
        self.rounds.append(list(self.client.answers))
        self.client.answers.clear()

    @property
    def answers(self) -> list[TimedResponse]:
        return [answer for answers in self.rounds for answer in answers]

    async def metrics(self) -> Metrics:
        moved = await _moved_bytes(self.client) - self.moved_before
        rate = median(totals(answers)["tokens_per_s"] for answers in self.rounds)
        complete = [answer for answer in self.answers if answer.complete]
        return latencies(complete) | {"tokens_per_s": rate, "moved_mb": moved / 1e6}


def _gap_ratios(
    ones: Sequence[Sequence[TimedResponse]], others: Sequence[Sequence[TimedResponse]], percent: float
) -> list[float]:
    """Round by round, a percentile of the times between tokens over the other's."""

    def gaps(answers: Sequence[TimedResponse]) -> float:
        return percentile([gap for answer in answers for gap in answer.gaps], percent)

    return [gaps(one) / gaps(other) for one, other in zip(ones, others, strict=True)]


async def _moved_bytes(client: Client) -> float:
    """As the server counts them."""
    found = re.search(r"^\w+:kv_moved_bytes\w*(?:\{[^}]*\})? (\S+)", await client.text("/metrics"), re.MULTILINE)
    return float(found[1]) if found else 0.0
