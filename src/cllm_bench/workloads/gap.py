"""Many prompts arrive at once while others are streaming: how long are the gaps, and what do short prompts wait?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cllm_bench.client import Client
from cllm_bench.figures import OURS, Figure, Limit, Metrics, Run, own
from cllm_bench.peers.base import Needs
from cllm_bench.prompts import Prompts
from cllm_bench.response import TimedResponse
from cllm_bench.stats import percentile
from cllm_bench.workloads.base import Keep, Setup
from cllm_bench.workloads.newcomers import streams_and_newcomers
from cllm_bench.workloads.over_http import HttpWorkload

SETTING = "scheduler.max_gap_ms"
LIMITS_MS = (100, 250, 500, 1000)
"""What the setting is compared at, each a server of its own."""


def side_of(limit_ms: int) -> str:
    return f"max_gap_ms {limit_ms}"


LONGEST = side_of(LIMITS_MS[-1])


@dataclass(frozen=True)
class Gap(HttpWorkload):
    """Streams run; once each has shown some text, all the prompts are sent. cLLM does it as it is set, and once with
    each of several limits."""

    streams: int = 4
    stream_tokens: int = 192
    head_start: int = 10
    prompts: int = 8
    prompt_tokens: int = 330
    stream_prompt_tokens: int = 32
    answer_tokens: int = 64

    name = "gap"
    headline = "stream_p99_ms"
    figures = (
        Figure("stream_p50_ms", "streams: between tokens, P50", "ms"),
        Figure("stream_p99_ms", "streams: between tokens, P99", "ms", limit=own(250.0)),
        Figure("worst_gap_ms", "streams: worst gap", "ms"),
        Figure("newcomer_ttft_p50_ms", "newcomers: first token, P50", "ms"),
        Figure("newcomer_ttft_max_ms", "newcomers: first token, last", "ms"),
        Figure("newcomer_p99_ms", "newcomers: between tokens, P99", "ms"),
        Figure("tokens_per_s", "tokens out", "tok/s", "higher", Limit("ratio", 1.0, {LONGEST: 0.93}, only_named=True)),
    )

    @property
    def title(self) -> str:
        return (
            f"gap: {self.streams} streams of {self.stream_tokens} tokens, "
            f"then {self.prompts} prompts of {self.prompt_tokens} tokens at once, {self.answer_tokens} out"
        )

    @property
    def needs(self) -> Needs:
        longest = max(self.prompt_tokens + self.answer_tokens, self.stream_prompt_tokens + self.stream_tokens)
        return Needs(self.name, at_once=self.streams + self.prompts, tokens=longest)

    def quick(self) -> Gap:
        return replace(self, streams=2, stream_tokens=48, prompts=3, prompt_tokens=100, answer_tokens=8)

    async def one_pass(self, setup: Setup, side: str, repeat: int, keep: Keep) -> None:
        await super().one_pass(setup, side, repeat, keep)
        if side == OURS and setup.url is None:
            await self._with_each_limit(setup, repeat, keep)

    async def _with_each_limit(self, setup: Setup, repeat: int, keep: Keep) -> None:
        for limit_ms in LIMITS_MS if repeat % 2 else LIMITS_MS[::-1]:
            limited = replace(setup, settings={**setup.settings, SETTING: limit_ms})
            setup.view.say(f"{self.title}: {side_of(limit_ms)}, {repeat + 1} of {setup.repeats}")
            runs: list[Run] = []
            try:
                await super().one_pass(limited, OURS, repeat, runs.append)
            finally:
                for run in runs:
                    keep(replace(run, side=side_of(limit_ms)))

    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        stream_texts = [prompts.text(self.stream_prompt_tokens) for _ in range(self.streams)]
        texts = [prompts.text(self.prompt_tokens) for _ in range(self.prompts)]
        return figures_of(
            *await streams_and_newcomers(
                client, stream_texts, self.stream_tokens, self.head_start, texts, self.answer_tokens
            )
        )


def figures_of(streams: Sequence[TimedResponse], newcomers: Sequence[TimedResponse]) -> Metrics:
    gaps = [gap * 1e3 for answer in streams for gap in answer.gaps]
    later_gaps = [gap * 1e3 for answer in newcomers for gap in answer.gaps]
    first = [answer.ttft * 1e3 for answer in newcomers]
    return {
        "stream_p50_ms": percentile(gaps, 50),
        "stream_p99_ms": percentile(gaps, 99),
        "worst_gap_ms": max(answer.longest_silence for answer in streams) * 1e3,
        "newcomer_ttft_p50_ms": percentile(first, 50),
        "newcomer_ttft_max_ms": max(first),
        "newcomer_p99_ms": percentile(later_gaps, 99),
    }
