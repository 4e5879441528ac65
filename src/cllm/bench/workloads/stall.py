"""A long prompt arrives while others are reading their answers: for how long do they get nothing?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from cllm.bench.client import Answer, Client, at_most
from cllm.bench.figures import Figure, own
from cllm.bench.prompts import Prompts
from cllm.bench.stats import percentile
from cllm.bench.workloads.base import HttpWorkload, Metrics, totals


@dataclass(frozen=True)
class Stall(HttpWorkload):
    """Streams run; once each has shown some text, the long prompt is sent."""

    streams: int = 3
    stream_tokens: int = 256
    head_start: int = 10
    long_prompt_tokens: int = 2600
    prompt_tokens: int = 32
    answer_tokens: int = 16

    name = "stall"
    figures = (
        Figure("worst_gap_ms", "worst gap in the streams", "ms", limit=own(400.0)),
        Figure("inter_token_p50_ms", "inter-token in the streams, P50", "ms"),
        Figure("inter_token_p99_ms", "inter-token in the streams, P99", "ms"),
        Figure("long_ttft_ms", "the long prompt's time to first token", "ms"),
        Figure("seconds", "total", "s"),
    )

    @property
    def title(self) -> str:
        return (
            f"stall: {self.streams} streams of {self.stream_tokens} tokens, "
            f"then a prompt of {self.long_prompt_tokens} tokens"
        )

    def quick(self) -> Stall:
        return replace(self, stream_tokens=64, long_prompt_tokens=400, answer_tokens=2)

    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        texts = [prompts.text(self.prompt_tokens) for _ in range(self.streams)]
        long_text = prompts.text(self.long_prompt_tokens)
        started = [asyncio.Event() for _ in range(self.streams)]

        async def stream(index: int) -> Answer:
            def on_text(arrivals: int) -> None:
                if arrivals >= self.head_start:
                    started[index].set()

            try:
                return await client.complete(texts[index], self.stream_tokens, on_text)
            finally:
                started[index].set()

        async def long_prompt() -> Answer:
            for event in started:
                await event.wait()
            return await client.complete(long_text, self.answer_tokens)

        jobs: list[Callable[[], Awaitable[Answer]]] = [partial(stream, index) for index in range(self.streams)]
        jobs.append(long_prompt)
        *streams, long_answer = await at_most(len(jobs), jobs)
        gaps = [gap * 1e3 for answer in streams for gap in answer.gaps]
        return {
            "worst_gap_ms": max(answer.longest_silence for answer in streams) * 1e3,
            "inter_token_p50_ms": percentile(gaps, 50),
            "inter_token_p99_ms": percentile(gaps, 99),
            "long_ttft_ms": long_answer.ttft * 1e3,
            "seconds": totals([*streams, long_answer])["seconds"],
        }
