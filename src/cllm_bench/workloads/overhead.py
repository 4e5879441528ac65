"""The overhead of our layers: the same tokens, one stream, with cLLM around llama.cpp and with its C API alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

from cllm.config import load_config
from cllm.engine.params import SamplingParams
from cllm.llm import AsyncLLM
from cllm_bench.figures import OURS, Figure, Run, own
from cllm_bench.kernels.llama import LlamaEngine, token_ms
from cllm_bench.kernels.streams import draw_tokens
from cllm_bench.stats import percent_more
from cllm_bench.workloads.base import LocalWorkload, Setup

BARE = "bare C API"


@dataclass(frozen=True)
class Overhead(LocalWorkload):
    """Both sides take turns on prompts of the same length. The ratio within each round is what counts: the machine is
    faster in one than in the next."""

    prompt_tokens: int = 32
    answer_tokens: int = 64
    rounds: int = 16

    name = "overhead"
    figures = (
        Figure("overhead_percent", "overhead per token", "%", limit=own(5.0)),
        Figure("token_ms", "one token", "ms"),
    )

    @property
    def title(self) -> str:
        sizes = f"{self.prompt_tokens} tokens in, {self.answer_tokens} out, {self.rounds} rounds in turn"
        return f"overhead: one stream, {sizes}"

    def quick(self) -> Overhead:
        return replace(self, answer_tokens=8, rounds=2)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        settings = {"model.name": str(setup.model_file), "backend.type": "llama_cpp", "backend.threads": setup.threads}
        settings |= {"backend.llama_cpp.n_seq_max": 1, "resources.max_context_length": 2048}
        bare = LlamaEngine(model=str(setup.model_file), threads=setup.threads)
        sides: dict[str, list[float]] = {OURS: [], BARE: []}
        async with AsyncLLM(load_config(overrides=settings | {"kv.disk.enabled": False}).config) as llm:
            for number in range(-1, self.rounds):  # the first round warms up
                prompt = draw_tokens(self.prompt_tokens, f"{repeat} {number}", bare.n_vocab)
                # The order alternates, so that a drift of the machine hits both alike.
                for side in (OURS, BARE) if number % 2 == 0 else (BARE, OURS):
                    answer = self._ours(llm, prompt) if side == OURS else bare.answer(prompt, self.answer_tokens)
                    sides[side].append(await answer)
        bare.forget()
        ours, theirs = sides[OURS][1:], sides[BARE][1:]
        more = percent_more("overhead_percent", [our / their for our, their in zip(ours, theirs, strict=True)])
        metrics = {OURS: {"token_ms": median(ours)} | more, BARE: {"token_ms": median(theirs)}}
        return [Run(side, repeat, each) for side, each in metrics.items()]

    async def _ours(self, llm: AsyncLLM, prompt: Sequence[int]) -> float:
        params = SamplingParams(max_tokens=self.answer_tokens, temperature=0.0, ignore_eos=True)
        return token_ms([perf_counter() async for delta in llm.submit(prompt, params) for _ in delta.token_ids])
