"""One stream, many times longer than the context: does a rolling window keep its speed and its memory?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.http import Address
from cllm_bench.servers import Server
from cllm_bench.sse import EventReader
from cllm_bench.watch import resident_mb
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest
from cllm_bench.workloads.over_http import warm_cllm

TIMEOUT_S = 36_000.0


@dataclass(frozen=True)
class Window(LocalWorkload):
    """One request, sampled with a seed, as long as asked for. Speed is that of the last tenth beside that of the tokens
    which followed the first drop."""

    tokens: int = 50_000
    context: int = 8192
    keep: int = 16
    recent: int = 7920
    early_tokens: int = 4808
    prompt_tokens: int = 64

    name = "window"
    figures = (
        Figure("speed_kept", "speed in the end / behind the first drop", "x", "higher", limit=own(0.97)),
        Figure("growth_percent", "resident memory: the end over the first drop", "%", limit=own(2.0)),
        Figure("early_tokens_per_s", "tokens/s behind the first drop", "tokens/s", "higher"),
        Figure("late_tokens_per_s", "tokens/s in the end", "tokens/s", "higher"),
        Figure("worst_gap_ms", "worst gap between tokens", "ms"),
        Figure("resident_mb", "resident in the end", "MB"),
    )

    @property
    def title(self) -> str:
        return (
            f"window: a stream of {self.tokens:,} tokens on a context of {self.context:,}, "
            f"of which {self.keep} first and {self.recent:,} recent ones are kept"
        )

    def quick(self) -> Window:
        return replace(self, tokens=900, context=256, recent=160, early_tokens=150)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        if self.tokens < self.context + 2 * self.early_tokens:
            raise BenchError(f"{self.tokens} tokens are too few to go round a context of {self.context}")
        settings: dict[str, Any] = {
            "resources.max_context_length": self.context,
            "scheduler.request_timeout_s": TIMEOUT_S,
            **setup.settings,
        }
        async with warm_cllm(setup, settings) as (server, _):
            facts = {**server.facts, "busy_percent_before": await busy_at_rest()}
            prompt = setup.prompts(f"{self.name} {repeat}").text(self.prompt_tokens)
            metrics = await self._stream(server, prompt, setup)
        return [Run(OURS, repeat, metrics, facts)]

    async def _stream(self, server: Server, prompt: str, setup: Setup) -> Metrics:
        assert server.pid is not None
        reading = _Reading(server.pid, self.context, lambda count: setup.view.say(f"{self.name}: {count:,} tokens"))
        body = {
            "prompt": prompt,
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": 1,
            "context_window": {"keep": self.keep, "recent": self.recent},
        }
        address = Address(server.url)
        sent = json.dumps(body).encode()
        status = await address.ask("POST", "/generate_stream", sent, on_body=reading.take, limit_s=TIMEOUT_S)
        if status != 200 or reading.tokens != self.tokens:
            raise BenchError(f"the stream ended with {status} after {reading.tokens} tokens: {reading.start!r}")
        return figures_of(reading, self.context, self.early_tokens)


class _Reading:
    """When the n-th token came, and the memory of the server when the context was full and since."""

    def __init__(self, pid: int, context: int, say: Callable[[int], None]) -> None:
        self.times: list[float] = []
        self.resident: list[tuple[int, float]] = []
        self.start = b""
        self._pid = pid
        self._context = context
        self._say = say
        self._events = EventReader()
        self._next_look = context

    @property
    def tokens(self) -> int:
        return len(self.times)

    def take(self, data: bytes, now: float) -> None:
        self.start = self.start or data[:300]
        for payload in self._events.feed(data):
            if payload != b"[DONE]":
                event = json.loads(payload)
                count = event["generated_tokens"] - self.tokens if event["done"] else len(event["token"])
                self.times += [now] * count
        if self.tokens >= self._next_look:
            self._next_look = self.tokens + max(1, self._context // 8)
            self.resident.append((self.tokens, resident_mb(self._pid)))
            self._say(self.tokens)


def figures_of(reading: _Reading, context: int, early_tokens: int) -> Metrics:
    times = reading.times
    late = len(times) // 10

    def speed(first: int, last: int) -> float:
        return (last - first) / (times[last] - times[first])

    early_speed, late_speed = speed(context, context + early_tokens), speed(len(times) - 1 - late, len(times) - 1)
    first_mb, last_mb = reading.resident[0][1], reading.resident[-1][1]
    return {
        "speed_kept": late_speed / early_speed,
        "growth_percent": (last_mb / first_mb - 1) * 100,
        "early_tokens_per_s": early_speed,
        "late_tokens_per_s": late_speed,
        "worst_gap_ms": max(later - sooner for sooner, later in pairwise(times)) * 1e3,
        "resident_mb": last_mb,
    }
