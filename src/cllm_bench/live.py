"""What a person sees while a benchmark runs: figures so far on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cllm_bench.client import Client
from cllm_bench.response import TimedResponse
from cllm_bench.stats import percentile
from cllm_bench.watch import Sample, Watcher

REFRESH_S = 0.5
"""Drawing takes a millisecond or two of the load generator's time, so it must be rare."""
PLAIN_S = 30.0
_RECENT = 200
"""Answers that the figures on the screen are made of."""
_WINDOW_S = 5.0


class View:
    """Says nothing; what the others have in common."""

    def say(self, line: str) -> None:
        """What is being done now."""

    @asynccontextmanager
    async def following(self, client: Client, watcher: Watcher) -> AsyncIterator[None]:
        """While the block runs, show what comes in."""
        yield


class PlainView(View):
    """A line for every pass, and one now and then while it runs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @asynccontextmanager
    async def following(self, client: Client, watcher: Watcher) -> AsyncIterator[None]:
        async with _repeating(PLAIN_S, lambda: self.say("  " + "; ".join(figures(client.answers, watcher.samples)))):
            yield


class LiveView(View):
    """One block at the bottom of the terminal; tables are printed above it."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._line = ""
        self._since = time.monotonic()

    @classmethod
    @contextmanager
    def on(cls, console: Console) -> Iterator[LiveView]:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield cls(live)

    def say(self, line: str) -> None:
        self._line, self._since = line, time.monotonic()
        self._show(())

    @asynccontextmanager
    async def following(self, client: Client, watcher: Watcher) -> AsyncIterator[None]:
        async with _repeating(REFRESH_S, lambda: self._show(figures(client.answers, watcher.samples))):
            yield

    def _show(self, lines: Sequence[str]) -> None:
        self._live.update(self._block(lines), refresh=True)

    def _block(self, lines: Sequence[str]) -> RenderableType:
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column()
        head.add_column(ratio=1)
        head.add_column(justify="right")
        seconds = int(time.monotonic() - self._since)
        head.add_row(Spinner("dots"), Text(self._line, style="bold"), f"{seconds // 60}:{seconds % 60:02d}")
        return Group(head, *(Text(f"  {line}", style="dim") for line in lines))


def figures(answers: Sequence[TimedResponse], samples: Sequence[Sample]) -> list[str]:
    """The pass so far in a few lines: counts over all of it, latencies over its latest answers."""
    ended = sum(answer.finished is not None for answer in answers)
    failed = sum(answer.error is not None for answer in answers)
    recent = answers[-_RECENT:]
    now = time.perf_counter()
    arrived = sum(len(answer.arrivals) - bisect_left(answer.arrivals, now - _WINDOW_S) for answer in recent)
    lines = [
        f"{ended} answers, {len(answers) - ended} running, {failed} failed; {arrived / _WINDOW_S:,.0f} tokens/s now",
        f"first token {_milliseconds([answer.ttft for answer in recent if answer.arrivals])}; "
        f"inter-token {_milliseconds([gap for answer in recent for gap in answer.gaps])}",
    ]
    if samples:
        lines.append(_resources(samples[-1]))
    return lines


def _milliseconds(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    return ", ".join(f"P{percent} {percentile(seconds, percent) * 1e3:,.0f} ms" for percent in (50, 95))


def _resources(sample: Sample) -> str:
    parts = []
    if sample.cpu_percent is not None and sample.resident_mb is not None:
        parts.append(f"CPU {sample.cpu_percent:.0f} %, {sample.resident_mb:,.0f} MB resident")
    if sample.kv_running_mb is not None and sample.kv_cached_mb is not None:
        parts.append(f"KV {sample.kv_running_mb:,.0f} MB running, {sample.kv_cached_mb:,.0f} MB cached")
    if sample.fragmentation_percent is not None:
        parts.append(f"{sample.fragmentation_percent:.0f} % fragmented")
    return "; ".join(parts)


@asynccontextmanager
async def _repeating(seconds: float, show: Callable[[], None]) -> AsyncIterator[None]:
    async def repeat() -> None:
        while True:
            await asyncio.sleep(seconds)
            show()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
