"""Prompts that come in turns, more of them than the GPU's memory holds: with the host's memory below it, without it,
and on a GPU that holds them all; beside them, streams that are to notice nothing.

Copies are compared with those of pinned memory alone. In batch-invariant mode, answers over K/V that came back are
those over K/V that were computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

from cllm.engine.observer import RequestRecord
from cllm.kv.memory import bytes_per_token

from .models import config_of
from .work import Bench, Keep, Measures, Place, engine, greedy

MIB = 1 << 20


@dataclass(frozen=True)
class Turns:
    prompts: int = 10
    """Twice as many as a small GPU holds, streams included."""
    length: int = 4096
    rounds: int = 4
    answer: int = 8
    streams: int = 16
    stream_in: int = 128
    stream_out: int = 500
    pause_s: float = 0.02
    copied_mb: int = 1024


TINY = Turns(prompts=8, length=160, rounds=3, streams=3, stream_in=16, stream_out=30, copied_mb=4)


async def host(place: Place, keep: Keep) -> None:
    turns = TINY if place.tiny else Turns()
    keep("pinned copies", raw_copies(place, turns))
    one = turns.length + turns.answer + 32
    every, streams = (turns.prompts + 1) * one, turns.streams * (turns.stream_in + turns.stream_out + 32)
    small = streams + int(2.5 * one)
    for name, on_gpu, on_host in (
        ("turns on the GPU", int(1.5 * (every + streams)), 0),
        ("turns through the host", small, every),
        ("turns computed again", small, 0),
    ):
        async with engine(settings(place, on_gpu, on_host)) as bench:
            keep(name, await in_turns(bench, turns) | await beside_streams(bench, turns) | traffic(bench))
    async with engine(settings(place, small, every, backend__torch__batch_invariant=True)) as bench:
        keep("invariant turns through the host", await equal_answers(bench, turns) | traffic(bench))


def settings(place: Place, gpu_tokens: int, host_tokens: int, **more: Any) -> dict[str, Any]:
    """With room for so many tokens' K/V."""
    token_mb = _token_bytes(config_of(place.shape("8B"))) / MIB
    room = {"resources__kv_cache_max_memory_mb": gpu_tokens * token_mb, "kv__host__max_mb": host_tokens * token_mb}
    return place.settings_for("8B", **room, **more)


def _token_bytes(config: dict[str, Any]) -> int:
    head = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    return bytes_per_token(
        n_layers=config["num_hidden_layers"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim_k=head,
        head_dim_v=head,
        type_k="f16",
        type_v="f16",
    )


def raw_copies(place: Place, turns: Turns) -> Measures:
    """The speed of copying one piece of pinned memory, as fast as it goes."""
    size = turns.copied_mb * MIB
    device = torch.zeros(size, dtype=torch.uint8, device=place.device)
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=place.on_gpu)

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if place.on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return size / median(times)

    return {"out_bytes_per_s": rate(memory, device), "in_bytes_per_s": rate(device, memory)}


async def in_turns(bench: Bench, turns: Turns) -> Measures:
    """The first tokens of prompts that were asked before, one after the other."""
    prompts = bench.prompts(turns.prompts, turns.length, "turns")
    first, cached = [], []
    for number in range(turns.rounds):
        for prompt in prompts:
            run = await bench.ask_alike([prompt], turns.answer)
            if number >= 2:
                first += run.first_s
                cached += run.cached
    return {
        "first_token_s": median(first),
        "first_token_worst_s": max(first),
        "cached_share": sum(cached) / len(cached) / turns.length,
    }


class Gaps:
    """The times between the tokens of streams."""

    def __init__(self, least: int) -> None:
        self.found: list[float] = []
        self._least = least

    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None: ...

    def on_finished(self, record: RequestRecord) -> None:
        if len(record.inter_token_s) >= self._least:
            self.found += record.inter_token_s

    def on_eviction(self, count: int, seconds: float) -> None: ...


async def beside_streams(bench: Bench, turns: Turns) -> Measures:
    """Streams, while the prompts go on in turns."""
    prompts = bench.prompts(turns.prompts, turns.length, "turns")
    gaps = Gaps(turns.stream_out // 2)
    bench.llm.observers.append(gaps)
    streams = asyncio.create_task(
        bench.ask_alike(bench.prompts(turns.streams, turns.stream_in, "streams"), turns.stream_out)
    )
    asked = 0
    first: list[float] = []
    while not streams.done():
        first += await _one(bench, prompts[asked % len(prompts)], turns.answer)
        asked += 1
        await asyncio.sleep(turns.pause_s)
    await streams
    bench.llm.observers.remove(gaps)
    cuts = quantiles(gaps.found, n=100)
    return {
        "gap_p50_s": cuts[49],
        "gap_p99_s": cuts[98],
        "gap_worst_s": max(gaps.found),
        "asked_beside_streams": asked,
        "first_token_beside_streams_s": median(first),
    }


async def _one(bench: Bench, prompt: Sequence[int], tokens: int) -> list[float]:
    generation = bench.llm.submit(prompt, greedy(tokens))
    async for _ in generation:
        pass
    return [generation.timings.ttft_s]


async def equal_answers(bench: Bench, turns: Turns) -> Measures:
    prompts = bench.prompts(turns.prompts, turns.length, "turns")
    rounds = [[(await bench.ask_alike([prompt], 16)).answers[0] for prompt in prompts] for _ in range(3)]
    different = sum(answer != first for later in rounds[1:] for answer, first in zip(later, rounds[0], strict=True))
    return {"requests": 2 * len(prompts), "different": different}


def traffic(bench: Bench) -> Measures:
    """What went between the host and the GPU, and how fast while it went."""
    kv = bench.llm.executor.kv()
    speeds = kv["details"]["host"] or {}
    rates = {key: speeds[key] for key in ("out_bytes_per_s", "in_bytes_per_s") if key in speeds}
    return {**kv["host"], **rates}
