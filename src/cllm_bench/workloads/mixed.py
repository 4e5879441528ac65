"""Users arrive at random with short and long prompts, and some leave early: latency on an ordinary day."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from cllm_bench.client import Client
from cllm_bench.figures import Figure, Metrics
from cllm_bench.load import Job, at_times
from cllm_bench.peers import Needs
from cllm_bench.prompts import Prompts
from cllm_bench.response import TimedResponse
from cllm_bench.workloads.over_http import HttpWorkload

_SYSTEM_PROMPTS = 3
_SYSTEM_TOKENS = 150
_LEAST = 4
"""Tokens in the shortest prompt or answer."""


@dataclass(frozen=True)
class Arrival:
    """Somebody who comes `at` seconds after the start."""

    at: float
    messages: list[dict[str, str]]
    answer_tokens: int
    leave_after: int | None
    """Pieces of text after which they go away; None: they stay to the end."""

    def visit(self, client: Client) -> Job[TimedResponse]:
        return partial(client.chat, self.messages, self.answer_tokens, leave_after=self.leave_after)


@dataclass(frozen=True)
class Mixed(HttpWorkload):
    """Arrivals are a Poisson process: nobody waits for anybody, so a slow server gets a queue. Half of the people come
    through one of a few applications with a system prompt of its own.
    """

    rate: float = 0.7
    """People per second, on average."""
    duration: float = 40.0
    """Seconds in which they come."""
    prompt_tokens: int = 100
    """In the middle: lengths are log-normal, as those in public traces about are. Many are short, a few very long."""
    prompt_spread: float = 0.9
    prompt_most: int = 1200
    answer_tokens: int = 40
    answer_spread: float = 0.7
    answer_most: int = 256
    leave_share: float = 0.1
    system_share: float = 0.5

    name = "mixed"
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("goodput_percent", "good answers", "%", "higher"),
        Figure("ttft_p95_ms", "first token, P95", "ms"),
        Figure("inter_token_p95_ms", "between tokens, P95", "ms"),
        Figure("left", "left, as planned", "", "higher"),
    )

    @property
    def title(self) -> str:
        return (
            f"{self.name}: {self.rate:g} people a second for {self.duration:g} s, "
            f"about {self.prompt_tokens} tokens in, {self.answer_tokens} out, {self.leave_share:.0%} leave"
        )

    @property
    def needs(self) -> Needs:
        return Needs(self.name, at_once=8, tokens=_SYSTEM_TOKENS + self.prompt_most + self.answer_most)

    def quick(self) -> Mixed:
        return replace(self, rate=4.0, duration=2.0, prompt_most=100, answer_tokens=16)

    def arrivals(self, prompts: Prompts) -> Iterator[Arrival]:
        """Everybody who comes, in order; the same for every server."""
        source = prompts.random
        systems = [prompts.rough(_SYSTEM_TOKENS) for _ in range(_SYSTEM_PROMPTS)]
        at = source.expovariate(self.rate)
        while at < self.duration:
            length = draw_length(source, self.prompt_tokens, self.prompt_spread, self.prompt_most)
            messages = [{"role": "user", "content": prompts.rough(length)}]
            if source.random() < self.system_share:
                messages.insert(0, {"role": "system", "content": source.choice(systems)})
            tokens = draw_length(source, self.answer_tokens, self.answer_spread, self.answer_most)
            leaves = tokens > 1 and source.random() < self.leave_share
            yield Arrival(at, messages, tokens, source.randrange(1, tokens) if leaves else None)
            at += source.expovariate(self.rate)

    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        await at_times((person.at, person.visit(client)) for person in self.arrivals(prompts))
        return {"left": sum(answer.left for answer in client.answers)}


def draw_length(source: random.Random, median: float, spread: float, most: int) -> int:
    return min(most, max(_LEAST, round(source.lognormvariate(math.log(median), spread))))
