"""What does an open status page cost the others? Streams with and without a reader of its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from cllm.kv.memory import MIB
from cllm.models.gguf import GGUFModel
from cllm_bench.client import Client
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.load import at_most
from cllm_bench.prompts import Prompts
from cllm_bench.sse import EventReader
from cllm_bench.stats import ratio_interval
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest
from cllm_bench.workloads.over_http import warm_cllm

BLOCK_TOKENS = 16
_FAKE_TOKEN_BYTES = 8
_FILLING = 3000
"""Tokens of each prompt that fills the arena, where tokens cost nothing."""


@dataclass(frozen=True)
class Page(LocalWorkload):
    """Rounds with and without readers take turns on one server, so that a drift of the machine hits both alike.

    Memory of the arena is only reserved. With `--backend fake` most of it is filled with cached prefixes before.
    """

    blocks: int = 100_000
    streams: int = 16
    readers: int = 1
    prompt_tokens: int = 64
    answer_tokens: int = 128
    rounds: int = 10

    name = "page"
    figures = (
        Figure("page_ratio", "tokens/s with the page open / without", "", "higher", own(0.98)),
        Figure("tokens_per_s", "with the page open", "tok/s", "higher"),
        Figure("alone_tokens_per_s", "without it", "tok/s", "higher"),
        Figure("events_per_s", "events a reader got", "1/s", "higher"),
        Figure("kib_per_s", "which are", "KiB/s"),
    )

    @property
    def title(self) -> str:
        return (
            f"page: an arena of {self.blocks:,} blocks, {self.streams} streams of {self.answer_tokens} tokens, "
            f"{self.readers} with the page open, {self.rounds} rounds in turn"
        )

    def quick(self) -> Page:
        return replace(self, answer_tokens=16, rounds=2, blocks=4096)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        prompts = setup.prompts(f"{self.name} {repeat}")
        facts: dict[str, Any] = {"busy_percent_before": await busy_at_rest()}
        async with warm_cllm(setup, self._settings(setup)) as (server, client):
            if setup.backend == "fake":
                await self._fill(client, prompts)
            return [Run(OURS, repeat, await self._rounds(client, prompts), {**facts, **server.facts})]

    def _settings(self, setup: Setup) -> dict[str, Any]:
        size = self.blocks * BLOCK_TOKENS * _token_bytes(setup)
        return {"resources.kv_cache_max_memory_mb": size / MIB, "scheduler.kv_cache_eviction_threshold": 0.95} | dict(
            setup.settings
        )

    async def _fill(self, client: Client, prompts: Prompts) -> None:
        count = int(0.9 * self.blocks * BLOCK_TOKENS) // _FILLING
        texts = [prompts.rough(_FILLING)[:_FILLING] for _ in range(count)]
        await at_most(self.streams, [partial(client.complete, text, 1) for text in texts])

    async def _rounds(self, client: Client, prompts: Prompts) -> Metrics:
        speeds: dict[bool, list[float]] = {True: [], False: []}
        readers = [_Reader(client) for _ in range(self.readers)]
        for number in range(self.rounds):
            texts = [prompts.rough(self.prompt_tokens) for _ in range(self.streams)]
            for watched in (True, False) if number % 2 == 0 else (False, True):
                async with _all_reading(readers if watched else []):
                    # Another text each time: nothing of it must come from the cache.
                    speeds[watched].append(await self._stream(client, [f"{watched} {text}" for text in texts]))
        found = ratio_interval([watched / alone for watched, alone in zip(speeds[True], speeds[False], strict=True)])
        seconds = sum(reader.seconds for reader in readers)
        return {
            **{"page_ratio": found.estimate, "page_ratio_low": found.low, "page_ratio_high": found.high},
            "tokens_per_s": median(speeds[True]),
            "alone_tokens_per_s": median(speeds[False]),
            "events_per_s": sum(reader.events for reader in readers) / seconds,
            "kib_per_s": sum(reader.size for reader in readers) / seconds / 1024,
        }

    async def _stream(self, client: Client, texts: list[str]) -> float:
        """Tokens a second."""
        start = perf_counter()
        jobs = [partial(client.complete, text, self.answer_tokens) for text in texts]
        answers = await at_most(self.streams, jobs)
        if failed := next((answer.error for answer in answers if answer.error), None):
            raise BenchError(f"an answer failed: {failed}")
        return sum(answer.completion_tokens for answer in answers) / (perf_counter() - start)


class _Reader:
    """Reads the page's stream and counts."""

    def __init__(self, client: Client) -> None:
        self._address = client.address
        self.events = 0
        self.size = 0
        self.seconds = 0.0
        self.first = asyncio.Event()

    async def read(self) -> None:
        events = EventReader()
        self.first.clear()

        def take(data: bytes, _now: float) -> None:
            self.size += len(data)
            self.events += len(events.feed(data))
            self.first.set()

        start = perf_counter()
        try:
            status = await self._address.ask("GET", "/kv/stream", on_body=take)
            raise BenchError(f"the page's stream ended with status {status}")
        finally:
            self.seconds += perf_counter() - start


@asynccontextmanager
async def _all_reading(readers: list[_Reader]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(reader.read()) for reader in readers]
    try:
        for reader, task in zip(readers, tasks, strict=True):
            first = asyncio.ensure_future(reader.first.wait())
            await asyncio.wait((first, task), return_when=asyncio.FIRST_COMPLETED)
            first.cancel()
            if task.done():
                task.result()
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _token_bytes(setup: Setup) -> int:
    if setup.backend == "fake":
        return _FAKE_TOKEN_BYTES
    shape = GGUFModel.open(setup.model_file).shape
    return shape.kv_bytes_per_token(
        setup.settings.get("resources.kv_type_k", "f16"), setup.settings.get("resources.kv_type_v", "f16")
    )
