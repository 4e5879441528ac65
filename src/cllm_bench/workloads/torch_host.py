"""Prompts in turns, more than a GPU holds: what does host memory save, and do streams beside them notice?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from cllm.engine.observer import RequestRecord
from cllm.kv.sizing import MIB
from cllm_bench.figures import OURS, Figure, Limit, Metrics, Run
from cllm_bench.pages.extras import check_extra
from cllm_bench.stats import percentile
from cllm_bench.workloads.base import LocalWorkload, Setup

if TYPE_CHECKING:
    from cllm_bench.torch_gpu.engines import Bench

ON_GPU = "all on the GPU"
COMPUTED = "computed again"


@dataclass(frozen=True)
class TorchHost(LocalWorkload):
    """The same prompts again and again on a GPU memory too small for all of them, with host memory below it and
    without, and on one that holds them all."""

    prompts: int = 10
    """Twice as many as the small memory holds, streams included."""
    prompt_tokens: int = 4096
    rounds: int = 4
    answer_tokens: int = 8
    streams: int = 16
    stream_prompt_tokens: int = 128
    stream_tokens: int = 500
    pause_s: float = 0.02
    tiny: bool = False

    name = "torch-host"
    needs_model = False
    figures = (
        Figure("first_ms", "a prompt that was asked before: first token", "ms"),
        Figure("cached_percent", "of its tokens from the cache", "%", "higher", compared=False),
        Figure("gap_p99_ms", "streams beside them: between tokens, P99", "ms", limit=Limit("ratio", 0, {ON_GPU: 0.95})),
        Figure("loads", "loads from host memory", "", "higher", compared=False),
    )

    @property
    def title(self) -> str:
        return f"torch-host: {self.prompts} prompts of {self.prompt_tokens:,} tokens in turns, {self.streams} streams"

    def quick(self) -> TorchHost:
        return replace(
            self, prompts=8, prompt_tokens=160, rounds=3, streams=3, stream_prompt_tokens=16, stream_tokens=30,
            tiny=True,
        )  # fmt: skip

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        check_extra("torch", f"cllm bench {self.name}", "torch")
        from cllm_bench.torch_gpu.engines import engine, random_models
        from cllm_bench.torch_gpu.models import kv_bytes

        one = self.prompt_tokens + self.answer_tokens + 32
        all_prompts = (self.prompts + 1) * one
        streams = self.streams * (self.stream_prompt_tokens + self.stream_tokens + 32)
        small = streams + int(2.5 * one)
        runs = []
        with random_models(setup, "8B", tiny=self.tiny) as place:
            token_mb = kv_bytes(place.shape("8B")) / MIB
            for side, on_gpu, on_host in (
                (OURS, small, all_prompts),
                (COMPUTED, small, 0),
                (ON_GPU, int(1.5 * (all_prompts + streams)), 0),
            ):
                setup.view.say(f"{self.name}: {setup.shown(side)}")
                memory = {
                    "resources__kv_cache_max_memory_mb": on_gpu * token_mb,
                    "kv__host__max_mb": on_host * token_mb,
                }
                async with engine(place.settings_for("8B", **memory)) as bench:
                    metrics = await self._in_turns(bench) | await self._beside_streams(bench)
                    runs.append(Run(side, repeat, metrics | {"loads": float(bench.llm.executor.kv()["host"]["loads"])}))
        return runs

    async def _in_turns(self, bench: Bench) -> Metrics:
        """The first tokens of prompts that were asked before, one after the other."""
        prompts = bench.prompts(self.prompts, self.prompt_tokens, "turns")
        first, cached = list[float](), list[int]()
        for number in range(self.rounds):
            for prompt in prompts:
                run = await bench.ask_alike([prompt], self.answer_tokens)
                if number >= 2:
                    first += run.first_s
                    cached += run.cached
        share = sum(cached) / len(cached) / self.prompt_tokens
        return {"first_ms": median(first) * 1e3, "cached_percent": 100 * share}

    async def _beside_streams(self, bench: Bench) -> Metrics:
        """Streams, while the prompts go on in turns."""
        prompts = bench.prompts(self.prompts, self.prompt_tokens, "turns")
        gaps = _Gaps(self.stream_tokens // 2)
        bench.llm.observers.append(gaps)
        texts = bench.prompts(self.streams, self.stream_prompt_tokens, "streams")
        streams = asyncio.create_task(bench.ask_alike(texts, self.stream_tokens))
        asked = 0
        while not streams.done():
            await bench.ask_alike([prompts[asked % len(prompts)]], self.answer_tokens)
            asked += 1
            await asyncio.sleep(self.pause_s)
        await streams
        bench.llm.observers.remove(gaps)
        return {"gap_p99_ms": percentile(gaps.found, 99) * 1e3}


class _Gaps:
    """The times between the tokens of streams; shorter answers are those of prompts."""

    def __init__(self, least: int) -> None:
        self.found: list[float] = []
        self._least = least

    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None: ...

    def on_finished(self, record: RequestRecord) -> None:
        if len(record.inter_token_s) >= self._least:
            self.found += record.inter_token_s

    def on_eviction(self, count: int, seconds: float) -> None: ...
