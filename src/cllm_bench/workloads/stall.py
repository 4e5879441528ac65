"""Long prompts arrive while others are streaming: how long do they get nothing?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from cllm_bench.client import Client
from cllm_bench.figures import Figure, Metrics, own
from cllm_bench.load import Job, at_most
from cllm_bench.peers import Needs
from cllm_bench.prompts import Prompts
from cllm_bench.response import TimedResponse
from cllm_bench.stats import percentile
from cllm_bench.workloads.over_http import HttpWorkload


@dataclass(frozen=True)
class Stall(HttpWorkload):
    """Streams run; once each has shown some text, the long prompts are sent, all at once."""

    streams: int = 3
    stream_tokens: int = 256
    head_start: int = 10
    long_prompts: int = 1
    long_prompt_tokens: int = 2600
    prompt_tokens: int = 32
    answer_tokens: int = 16

    name = "stall"
    figures = (
        Figure("worst_gap_ms", "worst gap in a stream", "ms", limit=own(200.0)),
        Figure("stream_p50_ms", "streams: between tokens, P50", "ms"),
        Figure("stream_p99_ms", "streams: between tokens, P99", "ms"),
        Figure("long_ttft_ms", "long prompts: first token, P50", "ms"),
        Figure("long_last_ttft_ms", "long prompts: first token of the last", "ms"),
    )

    @property
    def title(self) -> str:
        prompts = "a prompt" if self.long_prompts == 1 else f"{self.long_prompts} prompts"
        return (
            f"stall: {self.streams} streams of {self.stream_tokens} tokens, "
            f"then {prompts} of {self.long_prompt_tokens} tokens"
        )

    @property
    def needs(self) -> Needs:
        longest = max(self.long_prompt_tokens + self.answer_tokens, self.prompt_tokens + self.stream_tokens)
        return Needs(self.name, at_once=self.streams + self.long_prompts, tokens=longest)

    def quick(self) -> Stall:
        return replace(self, stream_tokens=32, long_prompt_tokens=200, answer_tokens=2)

    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        texts = [prompts.text(self.prompt_tokens) for _ in range(self.streams)]
        long_texts = [prompts.text(self.long_prompt_tokens) for _ in range(self.long_prompts)]
        answers = await self._ask(client, texts, long_texts)
        streams, later = answers[: self.streams], answers[self.streams :]
        gaps = [gap * 1e3 for answer in streams for gap in answer.gaps]
        return {
            "worst_gap_ms": max(answer.longest_silence for answer in streams) * 1e3,
            "stream_p50_ms": percentile(gaps, 50),
            "stream_p99_ms": percentile(gaps, 99),
            "long_ttft_ms": median(answer.ttft for answer in later) * 1e3,
            "long_last_ttft_ms": max(answer.ttft for answer in later) * 1e3,
        }

    async def _ask(self, client: Client, texts: Sequence[str], long_texts: Sequence[str]) -> list[TimedResponse]:
        """The answers of the streams, then of those who come when every stream has its head start."""
        started = [asyncio.Event() for _ in texts]

        async def stream(index: int) -> TimedResponse:
            def on_text(arrivals: int) -> None:
                if arrivals >= self.head_start:
                    started[index].set()

            try:
                return await client.complete(texts[index], self.stream_tokens, on_text)
            finally:
                started[index].set()

        async def newcomer(text: str) -> TimedResponse:
            for event in started:
                await event.wait()
            return await client.complete(text, self.answer_tokens)

        jobs: list[Job[TimedResponse]] = [partial(stream, index) for index in range(len(texts))]
        jobs += [partial(newcomer, text) for text in long_texts]
        return await at_most(len(jobs), jobs)
