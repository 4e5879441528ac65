"""The load generator alone, against a server that sends tokens at a known pace: are its figures right?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import mean

import psutil

from cllm_bench.client import Client
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.load import at_most
from cllm_bench.measures import PERCENTS
from cllm_bench.response import TimedResponse
from cllm_bench.servers import start_runner
from cllm_bench.stats import percentile
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest


@dataclass(frozen=True)
class Generator(LocalWorkload):
    """Every token carries the moment it was sent. The gaps between arrivals are held against the gaps between sends."""

    streams: int = 64
    interval_ms: float = 12.0
    tokens: int = 800

    name = "generator"
    needs_model = False
    figures = (
        Figure("tokens_per_s", "streamed tokens read at a known pace", "tok/s", "higher", own(5000.0)),
        *(
            Figure(f"added_p{percent}_percent", f"added to the inter-token P{percent}", "%", limit=own(5.0))
            for percent in PERCENTS
        ),
        Figure("added_mean_percent", "added to the mean inter-token time", "%", limit=own(5.0)),
        Figure("lag_p99_us", "from send to time stamp, P99", "us"),
        Figure("busy_percent", "CPU use of the generator (100 is one core)", "%"),
        Figure("most_tokens_per_s", "most that it reads, without a pace", "tok/s", "higher"),
    )

    @property
    def title(self) -> str:
        pace = self.streams / self.interval_ms * 1e3
        return f"generator: {self.streams} streams, a token each every {self.interval_ms:g} ms ({pace:,.0f} tok/s)"

    def quick(self) -> Generator:
        return replace(self, streams=8, tokens=50)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        facts = {"busy_percent_before": await busy_at_rest()}
        process = psutil.Process()
        before = process.cpu_times()
        paced = await self._read(self.interval_ms)
        after = process.cpu_times()
        seconds = max(answer.arrivals[-1] for answer in paced) - min(answer.started for answer in paced)
        used = after.user + after.system - before.user - before.system
        metrics = compare(paced) | {
            "tokens_per_s": sum(len(answer.arrivals) for answer in paced) / seconds,
            "busy_percent": 100 * used / seconds,
            "most_tokens_per_s": _speed(await self._read(0.0)),
        }
        return [Run(OURS, repeat, metrics, facts)]

    async def _read(self, interval_ms: float) -> list[TimedResponse]:
        async with (
            start_runner("the fake server", "fake_server", {"interval_ms": interval_ms}) as runner,
            Client(runner.ready["url"]) as client,
        ):
            answers = await at_most(self.streams, [partial(client.complete, "x", self.tokens)] * self.streams)
        failed = next((answer.error for answer in answers if answer.error), None)
        if failed:
            raise BenchError(f"the fake server failed: {failed}")
        return answers


def compare(answers: Sequence[TimedResponse]) -> Metrics:
    """What the generator adds: the gaps it reports over those that were sent, at the mean and at percentiles."""
    reported = [gap for answer in answers for gap in answer.gaps]
    sent: list[float] = []
    lags: list[float] = []
    for answer in answers:
        moments = [float(moment) for moment in answer.text.split()]
        sent += [later - sooner for sooner, later in pairwise(moments)]
        # Tokens that were read together share an arrival; the first of them has waited the longest.
        lags += [arrival - moment for arrival, moment in zip(answer.arrivals, moments, strict=True)]
    metrics = {
        f"added_p{percent}_percent": 100 * (percentile(reported, percent) / percentile(sent, percent) - 1)
        for percent in PERCENTS
    }
    metrics["added_mean_percent"] = 100 * (mean(reported) / mean(sent) - 1)
    metrics["lag_p99_us"] = percentile(lags, 99) * 1e6
    return metrics


def _speed(answers: Sequence[TimedResponse]) -> float:
    seconds = max(answer.arrivals[-1] for answer in answers) - min(answer.started for answer in answers)
    return sum(len(answer.arrivals) for answer in answers) / seconds
