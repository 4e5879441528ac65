"""The torch engine in batch-invariant mode: is an answer the same to the bit whatever runs beside it, at which cost?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cllm.engine.params import SamplingParams
from cllm_bench.figures import OURS, Figure, Run, own
from cllm_bench.pages.extras import check_extra
from cllm_bench.workloads.base import LocalWorkload, Setup

if TYPE_CHECKING:
    from cllm_bench.torch_gpu.engines import Bench

FAST = "the fast mode"
INVARIANT = {"backend__torch__batch_invariant": True}


@dataclass(frozen=True)
class TorchInvariance(LocalWorkload):
    """Requests of many lengths, every second one sampled: together, one by one, and in a pool so small that some are
    preempted. Then the speed of both modes."""

    requests: int = 64
    longest_prompt: int = 500
    longest_answer: int = 96
    tokens_in: int = 128
    tokens_out: int = 128
    many: int = 256
    tiny: bool = False

    name = "torch-invariance"
    needs_model = False
    figures = (
        Figure("different", "answers that differ alone, among others, in a small pool", "", limit=own(0.0)),
        Figure("preemptions", "preemptions in that pool", "", "higher", own(1.0), compared=False),
        Figure("one_tokens_per_s", "1 stream", "tok/s", "higher"),
        Figure("many_tokens_per_s", "many requests at once", "tok/s", "higher"),
    )

    @property
    def title(self) -> str:
        return f"torch-invariance: {self.requests} requests together, alone and in a small pool"

    def quick(self) -> TorchInvariance:
        return replace(
            self, requests=8, longest_prompt=40, longest_answer=40, tokens_in=16, tokens_out=12, many=8, tiny=True
        )

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        check_extra("torch", f"cllm bench {self.name}", "torch")
        from cllm_bench.torch_gpu.engines import engine, random_models

        with random_models(setup, "8B", tiny=self.tiny) as place:
            async with engine(place.settings_for("8B", **INVARIANT)) as bench:
                prompts, params = self._mixed(bench)
                together = (await bench.ask(prompts, params)).answers
                alone = [(await bench.ask([one], [how])).answers[0] for one, how in zip(prompts, params, strict=True)]
                ours = await bench.speeds(self.many, self.tokens_in, self.tokens_out)
                token_bytes = bench.llm.text.facts.bytes_per_token
            # Room for a third of what all take in the end, so that some who have begun must go; for the longest twice.
            needs = [len(one) + (how.max_tokens or 0) for one, how in zip(prompts, params, strict=True)]
            small_mb = max(sum(needs) / 3, 2.5 * max(needs)) * token_bytes / 2**20
            settings = {"resources__kv_cache_max_memory_mb": small_mb, "scheduler__max_step_tokens": 96, **INVARIANT}
            async with engine(place.settings_for("8B", **settings)) as bench:
                crowded = (await bench.ask(prompts, params)).answers
                preemptions = bench.llm.executor.snapshot().preemptions
            async with engine(place.settings_for("8B")) as bench:
                fast = await bench.speeds(self.many, self.tokens_in, self.tokens_out)
        different = sum(each != one for others in (alone, crowded) for one, each in zip(together, others, strict=True))
        ours |= {"different": float(different), "preemptions": float(preemptions)}
        return [Run(OURS, repeat, ours), Run(FAST, repeat, fast)]

    def _mixed(self, bench: Bench) -> tuple[Sequence[Sequence[int]], Sequence[SamplingParams]]:
        draw = random.Random("mixed")
        prompts, params = [], []
        for seed in range(self.requests):
            prompts += bench.prompts(1, draw.randint(4, self.longest_prompt), f"mixed {seed}")
            tokens = draw.randint(self.longest_answer // 3, self.longest_answer)
            greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            params.append(replace(greedy, temperature=0.8, top_p=0.95, seed=seed) if seed % 2 else greedy)
        return prompts, params
