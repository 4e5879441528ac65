"""A long prompt arrives while others are streaming: how long do they get nothing?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cllm_bench.client import Client
from cllm_bench.figures import Figure, Metrics, own
from cllm_bench.peers.base import Needs
from cllm_bench.prompts import Prompts
from cllm_bench.stats import percentile
from cllm_bench.workloads.newcomers import streams_and_newcomers
from cllm_bench.workloads.over_http import HttpWorkload


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
    headline = "worst_gap_ms"
    figures = (
        Figure("worst_gap_ms", "worst gap in a stream", "ms", limit=own(200.0)),
        Figure("stream_p50_ms", "streams: between tokens, P50", "ms"),
        Figure("stream_p99_ms", "streams: between tokens, P99", "ms"),
        Figure("long_ttft_ms", "long prompt: first token", "ms"),
    )

    @property
    def title(self) -> str:
        return (
            f"stall: {self.streams} streams of {self.stream_tokens} tokens, "
            f"then a prompt of {self.long_prompt_tokens} tokens"
        )

    @property
    def needs(self) -> Needs:
        longest = max(self.long_prompt_tokens + self.answer_tokens, self.prompt_tokens + self.stream_tokens)
        return Needs(self.name, at_once=self.streams + 1, tokens=longest)

    def quick(self) -> Stall:
        return replace(self, stream_tokens=32, long_prompt_tokens=200, answer_tokens=2)

    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        texts = [prompts.text(self.prompt_tokens) for _ in range(self.streams)]
        long_texts = [prompts.text(self.long_prompt_tokens)]
        streams, (long_answer,) = await streams_and_newcomers(
            client, texts, self.stream_tokens, self.head_start, long_texts, self.answer_tokens
        )
        gaps = [gap * 1e3 for answer in streams for gap in answer.gaps]
        return {
            "worst_gap_ms": max(answer.longest_silence for answer in streams) * 1e3,
            "stream_p50_ms": percentile(gaps, 50),
            "stream_p99_ms": percentile(gaps, 99),
            "long_ttft_ms": long_answer.ttft * 1e3,
        }
