"""After a burst: is its memory returned to the system, and does the next burst pay for that?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cllm.kv.sizing import MIB
from cllm_bench.client import Client
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.load import at_most
from cllm_bench.prompts import Prompts
from cllm_bench.response import TimedResponse
from cllm_bench.servers import Server
from cllm_bench.stats import percentile, ratio_interval
from cllm_bench.watch import Watcher
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest
from cllm_bench.workloads.over_http import warm_cllm

KEPT = "memory kept"
SAMPLE_S = 0.25
ROOM = 1.03
"""KV memory over what the burst fills: the server that keeps its memory then has all of it in use."""


@dataclass(frozen=True)
class MemoryBurst(LocalWorkload):
    """Two servers, one of which never gives memory back, take the same burst one after the other. Then all is quiet,
    and bursts follow that find the memory given back, or ready. Resident memory and the K/V of running requests and of
    the cache are sampled all the time.
    """

    filled_mb: float = 2000
    """K/V of the first burst."""
    prompt_tokens: int = 1000
    at_a_time: int = 16
    release_after_s: float = 5.0
    idle_mb: int = 256
    quiet_s: float = 10.0
    bursts: int = 4
    burst_requests: int = 32
    burst_prompt_tokens: int = 500

    name = "memory-burst"
    figures = (
        Figure("over_percent", "after the quiet: over before the burst and the idle size", "%", limit=own(5.0)),
        Figure("first_token_ratio", "first token, P50, of later bursts, over memory kept", "x", limit=own(1.1)),
        Figure("before_mb", "resident before", "MB"),
        Figure("peak_mb", "resident at the peak", "MB"),
        Figure("kv_peak_mb", "K/V at the peak", "MB"),
        Figure("after_mb", "resident after the quiet", "MB"),
        Figure("back_s", "quiet until it was back", "s"),
        Figure("ttft_p50_ms", "first token, P50, of later bursts", "ms"),
    )

    @property
    def title(self) -> str:
        return (
            f"memory-burst: {self.filled_mb:,g} MB of K/V, then {self.quiet_s:g} s of quiet "
            f"(kv.release_after_s {self.release_after_s:g}, kv.idle_mb {self.idle_mb}), then {self.bursts} bursts"
        )

    def quick(self) -> MemoryBurst:
        return replace(
            self, filled_mb=40, prompt_tokens=200, at_a_time=4, release_after_s=0.5, idle_mb=8, quiet_s=1.5, bursts=1,
            burst_requests=4, burst_prompt_tokens=50,
        )  # fmt: skip

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        async with AsyncExitStack() as stack:
            giving = await self._start(setup, stack, self.release_after_s)
            keeping = await self._start(setup, stack, None)
            facts: dict[str, Any] = {**giving.server.facts, "busy_percent_before": await busy_at_rest()}
            for side in (giving, keeping):
                await stack.enter_async_context(side.watcher)
                await self._first_burst(setup, side, repeat)
            for number in range(self.bursts):
                setup.view.say(f"{self.title}: burst {number + 1}")
                await asyncio.sleep(self.quiet_s)
                for side in (giving, keeping) if number % 2 == 0 else (keeping, giving):
                    # The same prompts for both, and never seen before.
                    await self._next_burst(setup.prompts(f"{self.name} {repeat} {number}"), side)
        ours = giving.metrics | giving.first_tokens() | first_token_ratio(giving.bursts, keeping.bursts)
        return [
            Run(OURS, repeat, ours, facts, samples=giving.watcher.samples),
            Run(KEPT, repeat, keeping.metrics | keeping.first_tokens(), samples=keeping.watcher.samples),
        ]

    async def _start(self, setup: Setup, stack: AsyncExitStack, release_after_s: float | None) -> _Side:
        settings = {
            "resources.kv_cache_max_memory_mb": round(self.filled_mb * 1e6 * ROOM / MIB, 1),
            "kv.idle_mb": self.idle_mb,
            **setup.settings,
            "kv.release_after_s": "null" if release_after_s is None else release_after_s,
        }
        server, client = await stack.enter_async_context(warm_cllm(setup, settings))
        return _Side(server, client, Watcher(client, server.pid, SAMPLE_S))

    async def _first_burst(self, setup: Setup, side: _Side, repeat: int) -> None:
        prompts = setup.prompts(f"{self.name} {repeat}")
        count = -(-int(self.filled_mb * 1e6) // (await _bytes_per_token(side.client) * self.prompt_tokens))
        await asyncio.sleep(2 * SAMPLE_S)
        before = side.resident()[-1][1]
        await side.ask([prompts.rough(self.prompt_tokens) for _ in range(count)], self.at_a_time)
        ended = side.resident()[-1][0]
        await asyncio.sleep(self.quiet_s)
        resident = side.resident()
        idle_mb = self.idle_mb * MIB / 1e6
        after = resident[-1][1]
        side.metrics = {
            "before_mb": before,
            "peak_mb": max(megabytes for _, megabytes in resident),
            "kv_peak_mb": max((each.kv_running_mb or 0) + (each.kv_cached_mb or 0) for each in side.watcher.samples),
            "after_mb": after,
            "over_percent": 100 * max(0.0, after - idle_mb - before) / before,
        }
        back = back_after([(at - ended, mb) for at, mb in resident if at >= ended], before * 1.05 + idle_mb)
        if back is not None:
            side.metrics["back_s"] = back

    async def _next_burst(self, prompts: Prompts, side: _Side) -> None:
        texts = [prompts.rough(self.burst_prompt_tokens) for _ in range(self.burst_requests)]
        side.bursts.append(await side.ask(texts, self.at_a_time))


@dataclass(slots=True)
class _Side:
    server: Server
    client: Client
    watcher: Watcher
    metrics: Metrics = field(default_factory=dict)
    bursts: list[Sequence[TimedResponse]] = field(default_factory=list)

    def resident(self) -> list[tuple[float, float]]:
        """Seconds, MB resident."""
        samples = self.watcher.samples
        return [(each.seconds, each.resident_mb) for each in samples if each.resident_mb is not None]

    async def ask(self, texts: Sequence[str], at_a_time: int) -> Sequence[TimedResponse]:
        answers = await at_most(at_a_time, [partial(self.client.complete, text, 2) for text in texts])
        self.client.raise_for_errors()
        return answers

    def first_tokens(self) -> Metrics:
        return {"ttft_p50_ms": _first_token(answer for burst in self.bursts for answer in burst) * 1e3}


async def _bytes_per_token(client: Client) -> int:
    kv = json.loads(await client.text("/kv") or "{}")
    if "bytes_per_unit" not in kv:
        raise BenchError(f"{client.address.url} does not say how large its K/V is")
    size: int = kv["bytes_per_unit"] // kv["unit_tokens"]
    return size


def _first_token(answers: Iterable[TimedResponse]) -> float:
    return percentile([answer.ttft for answer in answers], 50)


def first_token_ratio(ones: Sequence[Sequence[TimedResponse]], others: Sequence[Sequence[TimedResponse]]) -> Metrics:
    """Over the bursts, with its interval."""
    found = ratio_interval([_first_token(one) / _first_token(other) for one, other in zip(ones, others, strict=True)])
    return {
        "first_token_ratio": found.estimate,
        "first_token_ratio_low": found.low,
        "first_token_ratio_high": found.high,
    }


def back_after(samples: Sequence[tuple[float, float]], allowed: float) -> float | None:
    """From when on no sample was above; None if the last one is."""
    back = None
    for at, megabytes in samples:
        if megabytes > allowed:
            back = None
        elif back is None:
            back = at
    return back
