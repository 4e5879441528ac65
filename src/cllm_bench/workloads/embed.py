"""Embeddings compared with the prefill of one long prompt, and a scored prompt with an unscored one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from time import perf_counter
from typing import Any

from cllm.config import load_config
from cllm.engine.params import SamplingParams
from cllm.engine.submission import Submission
from cllm.engine.tenant import Tenant
from cllm.llm import AsyncLLM
from cllm.loading.embedder import EMBEDDING
from cllm.tasks.embedding import EmbeddingJob
from cllm_bench.figures import OURS, Figure, Run, own
from cllm_bench.workloads.base import SETTLE_S, LocalWorkload, Setup, busy_at_rest

PLAIN = SamplingParams(max_tokens=1, temperature=0.0)
SCORED = replace(PLAIN, prompt_logprobs=1)


@dataclass(frozen=True)
class Embed(LocalWorkload):
    """One engine in this process. Every text is a stranger's, in a space of its own, so that nothing is cached."""

    texts: int = 512
    text_tokens: int = 128
    prompt_tokens: int = 2000
    prompts: int = 3

    name = "embed"
    figures = (
        Figure("embed_tokens_per_s", "embeddings: tokens", "tok/s", "higher"),
        Figure("prefill_tokens_per_s", "prefill of a prompt of that length: tokens", "tok/s", "higher"),
        Figure("embed_share", "embeddings, of the speed of prefill", "x", "higher", own(0.85)),
        Figure("prompt_s", "a long prompt", "s"),
        Figure("scored_s", "the same, scored", "s"),
        Figure("scored_times", "the same, scored: times as long", "x", "lower", own(1.5)),
    )

    @property
    def title(self) -> str:
        return (
            f"embed: {self.texts} texts of {self.text_tokens} tokens, beside prompts of that length one after another; "
            f"then {self.prompts} prompts of {self.prompt_tokens} tokens, scored and not"
        )

    def quick(self) -> Embed:
        return replace(self, texts=16, text_tokens=32, prompt_tokens=128, prompts=1)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        settings: dict[str, Any] = {
            "model.name": setup.model if setup.backend == "fake" else str(setup.model_file),
            "backend.type": setup.backend,
            "backend.threads": setup.threads,
            "kv.disk.enabled": False,
            **setup.settings,
        }
        async with AsyncLLM(load_config(overrides=settings).config) as llm:
            facts = {"busy_percent_before": await busy_at_rest()}
            side = _Side(llm, setup.prompts(f"{self.name} {repeat}").random)
            await side.answer(self.prompt_tokens, PLAIN)
            setup.view.say(f"{self.name}: {self.texts} texts")
            speed = await side.embed(self.texts, self.text_tokens)
            setup.view.say(f"{self.name}: prompts of {self.text_tokens} tokens")
            prefill = await side.prefill(self.texts, self.text_tokens)
            setup.view.say(f"{self.name}: a prompt of {self.prompt_tokens} tokens")
            plain: list[float] = []
            scored: list[float] = []
            for number in range(self.prompts):
                for params, seconds in ((PLAIN, plain), (SCORED, scored))[:: 1 if number % 2 else -1]:
                    seconds.append(await side.answer(self.prompt_tokens, params))
        figures = {
            "embed_tokens_per_s": speed,
            "prefill_tokens_per_s": prefill,
            "embed_share": speed / prefill,
            "prompt_s": fmean(plain),
            "scored_s": fmean(scored),
            "scored_times": fmean(scored) / fmean(plain),
        }
        return [Run(OURS, repeat, figures, facts)]


class _Side:
    def __init__(self, llm: AsyncLLM, random: Random) -> None:
        self._llm = llm
        self._random = random

    def _stranger(self) -> Tenant:
        return Tenant(space=self._random.randbytes(8))

    def _ids(self, tokens: int) -> list[int]:
        return self._random.choices(range(self._llm.text.shape.n_vocab // 2), k=tokens)

    def _texts(self, count: int, tokens: int) -> Sequence[Sequence[int]]:
        return [self._ids(tokens) for _ in range(count)]

    async def embed(self, count: int, tokens: int) -> float:
        """Tokens a second."""
        await asyncio.sleep(SETTLE_S)
        texts = self._texts(count, tokens)
        tenant = self._stranger()
        start = perf_counter()
        asked = [Submission(text, EMBEDDING, tenant=tenant, embeds=True) for text in texts]
        await EmbeddingJob(self._llm, asked).compute()
        return count * tokens / (perf_counter() - start)

    async def prefill(self, count: int, tokens: int) -> float:
        """The same texts' worth of prompts, whose answers are one token, as many at once as embeddings."""
        await asyncio.sleep(SETTLE_S)
        numbers, texts, tenant = iter(range(count)), self._texts(count, tokens), self._stranger()

        async def work() -> None:
            for number in numbers:
                async for _ in self._llm.submit(texts[number], PLAIN, tenant=tenant):
                    pass

        start = perf_counter()
        await asyncio.gather(*(work() for _ in range(32)))
        return count * tokens / (perf_counter() - start)

    async def answer(self, tokens: int, params: SamplingParams) -> float:
        await asyncio.sleep(SETTLE_S)
        ids = self._ids(tokens)
        start = perf_counter()
        async for _ in self._llm.submit(ids, params, tenant=self._stranger()):
            pass
        return perf_counter() - start
