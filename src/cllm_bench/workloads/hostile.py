"""Abusive clients of many kinds: what do they get, and what do other streams and the memory suffer?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter
from typing import Any, ClassVar
from urllib.parse import urlsplit

from cllm_bench.attacks import ATTACKS, ENDED_LIMIT_S, Attack, Place, allow_connections
from cllm_bench.client import Client
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.prompts import Prompts
from cllm_bench.response import TimedResponse
from cllm_bench.watch import resident_mb
from cllm_bench.workloads.base import LocalWorkload, Setup
from cllm_bench.workloads.over_http import warm_cllm

SAMPLE_S = 0.05
BACK_MB = 50.0
"""Resident memory that may stay: the allocator's, for the next large request."""


_MEASURES = (
    ("gap_ms", "worst gap", "ms", 200.0),
    ("grown_mb", "grown", "MB", 200.0),
    ("kept_mb", "kept", "MB", BACK_MB),
)
"""What is measured for each attack, and at worst for all: its key, in words, its unit, and what it may be."""


def _figures() -> Iterator[Figure]:
    for key, words, unit, most in _MEASURES:
        yield Figure(f"worst_{key}", f"at worst: {words}", unit, limit=own(most))
    for attack in ATTACKS:
        yield Figure(f"{attack.key}_status", f"{attack.label}: answered", "")
        for key, words, unit, most in _MEASURES:
            yield Figure(f"{attack.key}_{key}", f"{attack.label}: {words}", unit, limit=own(most))


@dataclass(frozen=True)
class Hostile(LocalWorkload):
    """Streams run beside every attack. Resident memory is counted without what the KV cache has come to use."""

    streams: int = 3
    stream_tokens: int = 6000
    head_start: int = 10
    prompt_tokens: int = 32
    settle_s: float = 10.0
    header_mb: float = 150.0
    connections: int = 1000
    hold_s: float = 15.0
    token_ids: int = 2_000_000
    biases: int = 270_000
    prompts: int = 1_000_000
    keys: int = 300_000
    answers: int = 128
    answer_tokens: int = 300
    digits: int = 4_000_000
    at_once: int = 8
    source_mb: float = 1.0
    inputs: int = 10_000
    tools: int = 200
    first: int = 0
    """How many of the attacks to leave out."""

    name = "hostile"
    figures: ClassVar[tuple[Figure, ...]] = tuple(_figures())

    @property
    def title(self) -> str:
        return f"hostile: {len(ATTACKS[self.first :])} kinds of unkind clients beside {self.streams} streams"

    def quick(self) -> Hostile:
        return replace(
            self, stream_tokens=2000, settle_s=1.0, header_mb=2.0, connections=40, hold_s=0.5, token_ids=20_000,
            biases=3_000, prompts=10_000, keys=3_000, answers=4, answer_tokens=20, digits=40_000, at_once=2,
            source_mb=0.05, inputs=100, tools=20,
        )  # fmt: skip

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        allow_connections(self.connections)
        metrics: Metrics = {}
        broken: list[str] = []
        async with warm_cllm(setup, setup.settings) as (server, client):
            assert server.pid is not None
            for attack in ATTACKS[self.first :]:
                setup.view.say(f"{self.title}: {attack.label}")
                beside = _AttackRun(self, client, setup.prompts(f"{attack.key} {repeat}"), server.pid)
                try:
                    found = await beside.measure(attack)
                except BenchError as error:
                    broken.append(f"{attack.label}: {error}")
                else:
                    metrics |= {f"{attack.key}_{name}": value for name, value in found.items()}
            facts = dict(server.facts)
        for key, *_ in _MEASURES:
            of_each = [value for name, value in metrics.items() if name.endswith(key)]
            metrics[f"worst_{key}"] = max(of_each, default=0.0)
        return [Run(OURS, repeat, metrics, facts, partial="; ".join(broken) or None)]


class _AttackRun:
    """Streams, and a look at the server's memory, while somebody is unkind."""

    def __init__(self, work: Hostile, client: Client, prompts: Prompts, pid: int) -> None:
        self._work = work
        self._client = client
        self._texts = [prompts.text(work.prompt_tokens) for _ in range(work.streams)]
        self._pid = pid
        # Until Python 3.12, waiting with a limit may swallow a cancellation that comes with the result. So tasks that
        # are cancelled look at these, too.
        self._attacking = True
        self._over = False
        self._kv_mb = 0.0
        self._rest_mb: list[float] = []
        """Resident memory beside the KV cache, sampled."""

    async def measure(self, attack: Attack) -> Metrics:
        content = await asyncio.to_thread(attack.prepare, self._work)
        self._client.answers.clear()
        streams = [asyncio.create_task(self._stream(text)) for text in self._texts]
        try:
            await self._until_started(streams)
            await self._sample_kv()
            watching = asyncio.create_task(self._watch())
            begin, before = perf_counter(), self._rest()
            try:
                statuses = await asyncio.to_thread(attack.run, _place(self._client), self._work, content)
                await self._until_alone()
                await asyncio.sleep(0.5)
            finally:
                end = perf_counter()
                self._attacking = False
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        finally:
            self._over = True
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        answers = self._client.answers
        failed = [answer.error for answer in answers if answer.error]
        if failed:
            raise BenchError(f"a stream beside it failed: {failed[0]}")
        metrics = {
            "gap_ms": worst_gap(answers, begin, end) * 1e3,
            "grown_mb": max(0.0, max(self._rest_mb) - before),
            "kept_mb": max(0.0, await self._kept(before)),
        }
        return metrics | ({"status": float(statuses[-1])} if statuses else {})

    async def _stream(self, text: str) -> None:
        while not self._over:
            await self._client.complete(text, self._work.stream_tokens)

    async def _until_started(self, streams: list[asyncio.Task[None]]) -> None:
        while sum(len(answer.arrivals) >= self._work.head_start for answer in self._client.answers) < len(streams):
            if failed := self._client.first_error:
                raise BenchError(f"a stream beside it did not start: {failed}")
            await asyncio.sleep(0.02)

    async def _until_alone(self) -> None:
        """Whatever the attack has set going must end with it."""
        end = perf_counter() + ENDED_LIMIT_S
        while (await self._kv()).get("running", 0) > self._work.streams:
            if perf_counter() > end:
                raise BenchError(f"requests whose clients are gone still run after {ENDED_LIMIT_S:g} s")
            await asyncio.sleep(0.1)

    async def _watch(self) -> None:
        while self._attacking:
            for _ in range(10):
                self._rest_mb.append(self._rest())
                await asyncio.sleep(SAMPLE_S)
            await self._sample_kv()

    async def _kept(self, before: float) -> float:
        """What is still there when the server has had time to give it back."""
        end = perf_counter() + self._work.settle_s
        while True:
            await self._sample_kv()
            kept = self._rest() - before
            if kept <= BACK_MB / 2 or perf_counter() > end:
                return kept
            await asyncio.sleep(0.5)

    def _rest(self) -> float:
        return resident_mb(self._pid) - self._kv_mb

    async def _sample_kv(self) -> None:
        """Blocks that were ever taken, whose pages stay with the process, and memory that is kept ready for more."""
        kv = await self._kv()
        if kv:
            taken = kv["bytes"]["total"] - kv["bytes"]["free"] + kv["extents_ready"] * kv["extent_bytes"]
            self._kv_mb = max(self._kv_mb, taken / 1e6)

    async def _kv(self) -> dict[str, Any]:
        """What the server tells of its cache; nothing if it does not answer just now."""
        kv: dict[str, Any] = json.loads(await self._client.text("/kv") or "{}")
        return kv


def worst_gap(answers: list[TimedResponse], begin: float, end: float) -> float:
    """The longest time between `begin` and `end` in which a stream got nothing, in seconds."""
    gaps = []
    for answer in answers:
        moments = [*answer.arrivals, end] if answer.finished is None else answer.arrivals
        gaps += [later - sooner for sooner, later in pairwise(moments) if later > begin]
    return max(gaps, default=0.0)


def _place(client: Client) -> Place:
    parts = urlsplit(client.address.url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port
