"""What a person sees while a benchmark runs: a line for every pass, and one now and then while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rich.console import Console

from cllm_bench.client import Client
from cllm_bench.response import TimedResponse
from cllm_bench.stats import percentile
from cllm_bench.watch import Sample, Watcher

EVERY_S = 30.0
_RECENT = 200
"""Answers that the figures on the screen are made of."""


class View:
    """Says nothing without a console."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console

    def say(self, line: str) -> None:
        """What is being done now."""
        if self._console is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @asynccontextmanager
    async def following(self, client: Client, watcher: Watcher) -> AsyncIterator[None]:
        """While the block runs, say what comes in."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(EVERY_S)
                self.say("  " + "; ".join(figures(client.answers, watcher.samples)))

        task = asyncio.create_task(repeat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def figures(answers: Sequence[TimedResponse], samples: Sequence[Sample]) -> list[str]:
    """The pass so far in a few phrases: counts over all of it, latencies over its latest answers."""
    ended = sum(answer.finished is not None for answer in answers)
    failed = sum(answer.error is not None for answer in answers)
    lines = [f"{ended} answers, {len(answers) - ended} running, {failed} failed"]
    if recent := [answer.ttft for answer in answers[-_RECENT:] if answer.arrivals]:
        lines.append(f"first token P50 {percentile(recent, 50) * 1e3:,.0f}, P95 {percentile(recent, 95) * 1e3:,.0f} ms")
    last = samples[-1] if samples else None
    if last is not None and last.resident_mb is not None:
        lines.append(f"{last.resident_mb:,.0f} MB resident")
    if last is not None and last.kv_running_mb is not None and last.kv_cached_mb is not None:
        lines.append(f"KV {last.kv_running_mb:,.0f} MB running, {last.kv_cached_mb:,.0f} MB cached")
    return lines
