"""Resident memory: how much more than the bare library cLLM takes, and whether it grows with the requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.load import at_most
from cllm_bench.prompts import Prompts
from cllm_bench.response import TimedResponse
from cllm_bench.servers import bare_times, start_bare
from cllm_bench.stats import slope
from cllm_bench.watch import resident_mb
from cllm_bench.workloads.base import LocalWorkload, Setup
from cllm_bench.workloads.context import ContextSize
from cllm_bench.workloads.over_http import warm_cllm

BARE = "bare llama.cpp"


@dataclass(frozen=True)
class Memory(LocalWorkload):
    """Short requests, a few at a time. The bare process holds the same model and context, and has run once."""

    requests: int = 2000
    at_a_time: int = 8
    sample_every: int = 20
    prompt_tokens: int = 4
    answer_tokens: int = 1
    context: ContextSize = field(default_factory=ContextSize)

    name = "memory"
    figures = (
        Figure("extra_mb", "more than the bare process", "MB", limit=own(200.0)),
        Figure("growth_percent", "last fifth over second fifth", "%", limit=own(2.0)),
        Figure("slope_bytes", "slope per request", "bytes"),
        Figure("loaded_mb", "resident when loaded", "MB"),
        Figure("final_mb", "resident in the end", "MB"),
    )

    @property
    def title(self) -> str:
        context = self.context
        return (
            f"memory: {self.requests} requests, {self.at_a_time} at a time, "
            f"context of {context.slots} x {context.slot_tokens} tokens"
        )

    def quick(self) -> Memory:
        return replace(self, requests=20, sample_every=2, at_a_time=2, context=ContextSize(2, 256))

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        prompts = setup.prompts(f"{self.name} {repeat}")
        bare_mb = await self._bare_mb(setup)
        ours = await self._ours(setup, prompts)
        ours["extra_mb"] = ours["final_mb"] - bare_mb
        return [Run(OURS, repeat, ours), Run(BARE, repeat, {"loaded_mb": bare_mb, "final_mb": bare_mb})]

    async def _bare_mb(self, setup: Setup) -> float:
        context = self.context
        async with start_bare(setup.model_file, setup.threads, context.slots, context.slot_tokens) as bare:
            await bare_times(bare, range(64), 4)
            return resident_mb(bare.pid)

    async def _ours(self, setup: Setup, prompts: Prompts) -> Metrics:
        texts = [prompts.text(self.prompt_tokens) for _ in range(self.requests)]
        settings = self.context.settings(setup.model_file)
        async with warm_cllm(setup, settings, "llama_cpp") as (server, client):
            assert server.pid is not None
            loaded = resident_mb(server.pid)
            samples: list[tuple[int, float]] = []
            done = 0

            async def request(pid: int, text: str) -> TimedResponse:
                nonlocal done
                answer = await client.complete(text, self.answer_tokens)
                if answer.error:
                    raise BenchError(answer.error)
                done += 1
                if done % self.sample_every == 0:
                    samples.append((done, resident_mb(pid)))
                return answer

            await at_most(self.at_a_time, [partial(request, server.pid, text) for text in texts])
        return {"loaded_mb": loaded, **trend(samples)}


def trend(samples: list[tuple[int, float]]) -> Metrics:
    """Growth once the first fifth has warmed everything up: caches and buffers that fill are no leak."""
    size = max(1, len(samples) // 5)
    settled = samples[size:]
    before = median(resident for _, resident in settled[:size])
    after = median(resident for _, resident in settled[-size:])
    return {
        "final_mb": after,
        "growth_percent": (after / before - 1) * 100,
        "slope_bytes": slope([done for done, _ in settled], [resident * 1e6 for _, resident in settled]),
    }
