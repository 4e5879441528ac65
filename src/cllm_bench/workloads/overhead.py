"""The overhead of our layers: the same tokens, one stream, with cLLM around llama.cpp and with the bare C API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from cllm.config import load_config
from cllm.engine.params import SamplingParams
from cllm.kv.memory import MIB
from cllm.llm import AsyncLLM
from cllm.models.gguf import GGUFModel
from cllm.text.tokenizer import load_tokenizer
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.servers import Runner, bare_times, start_bare
from cllm_bench.stats import percent_more
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest

BARE = "bare C API"
_STORE_MIB = 16
"""What cLLM may keep of finished sequences beside the slots."""


@dataclass(frozen=True, slots=True)
class ContextSize:
    """The same llama.cpp context on both sides."""

    slots: int = 8
    slot_tokens: int = 2048

    def settings(self, model: Path) -> dict[str, Any]:
        """What makes cLLM take exactly these slots."""
        per_token = GGUFModel.open(model).spec.kv_bytes_per_token("f16", "f16")
        return {
            "backend.llama_cpp.n_seq_max": self.slots,
            "backend.llama_cpp.slots_on_demand": False,
            "resources.max_context_length": self.slot_tokens,
            "resources.kv_cache_max_memory_mb": self.slots * self.slot_tokens * per_token / MIB + _STORE_MIB,
        }


@dataclass(frozen=True)
class Overhead(LocalWorkload):
    """Both sides take turns on the same prompts, so that every token is computed at the same sequence length. The ratio
    within each round is what counts: the machine is faster in one than in the next.
    """

    prompt_tokens: int = 32
    answer_tokens: int = 64
    rounds: int = 16
    context: ContextSize = field(default_factory=ContextSize)

    name = "overhead"
    figures = (
        Figure("overhead_percent", "overhead per token", "%", limit=own(5.0)),
        Figure("token_ms", "one token", "ms"),
        Figure("first_ms", "prompt to first token", "ms"),
    )

    @property
    def title(self) -> str:
        return (
            f"overhead: one stream, {self.prompt_tokens} tokens in, {self.answer_tokens} out, "
            f"{self.rounds} rounds in turn"
        )

    def quick(self) -> Overhead:
        return replace(self, answer_tokens=8, rounds=2, context=ContextSize(2, 256))

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        context = self.context
        # llama.cpp on both sides, whatever --backend says: with `fake`, the setup's tokens would be bytes.
        setup = replace(setup, encode=load_tokenizer(GGUFModel.open(setup.model_file)).encode)
        prompts = setup.prompts(f"{self.name} {repeat}")
        texts = [prompts.text(self.prompt_tokens) for _ in range(self.rounds)]
        facts = {"busy_percent_before": await busy_at_rest()}
        async with start_bare(setup.model_file, setup.threads, context.slots, context.slot_tokens) as bare:
            ours, theirs = await self._in_process(setup, texts, bare)
        return [Run(OURS, repeat, ours, facts), Run(BARE, repeat, theirs)]

    async def _in_process(self, setup: Setup, texts: Sequence[str], bare: Runner) -> tuple[Metrics, Metrics]:
        settings = {
            "model.name": str(setup.model_file),
            "backend.type": "llama_cpp",
            "backend.threads": setup.threads,
            "kv.disk.enabled": False,
            **self.context.settings(setup.model_file),
        }
        ours: list[list[float]] = []
        theirs: list[list[float]] = []
        async with AsyncLLM(load_config(overrides=settings).config) as llm:
            warm = setup.encode(setup.prompts("warm-up").text(self.prompt_tokens))
            await self._ours(llm, warm)
            await bare_times(bare, warm, self.answer_tokens)
            for number, prompt in enumerate(map(setup.encode, texts)):
                # The order alternates, so that a drift of the machine hits both alike.
                for ours_now in (True, False) if number % 2 == 0 else (False, True):
                    if ours_now:
                        ours.append(await self._ours(llm, prompt))
                    else:
                        theirs.append(await bare_times(bare, prompt, self.answer_tokens))
        ratios = [_token_ms(our) / _token_ms(their) for our, their in zip(ours, theirs, strict=True)]
        return _metrics(ours) | percent_more("overhead_percent", ratios), _metrics(theirs)

    async def _ours(self, llm: AsyncLLM, prompt: Sequence[int]) -> list[float]:
        """Seconds from the start to each token; tokens that came together share a time."""
        times: list[float] = []
        params = SamplingParams(max_tokens=self.answer_tokens, temperature=0.0, ignore_eos=True)
        start = perf_counter()
        async for delta in llm.submit(prompt, params):
            times += [perf_counter() - start] * len(delta.token_ids)
        return times


def _metrics(rounds: Sequence[Sequence[float]]) -> Metrics:
    return {
        "token_ms": median(_token_ms(times) for times in rounds),
        "first_ms": median(times[0] * 1e3 for times in rounds),
    }


def _token_ms(times: Sequence[float]) -> float:
    """Mean over all tokens that came after the first ones."""
    later = sum(time > times[0] for time in times)
    return (times[-1] - times[0]) / later * 1e3
