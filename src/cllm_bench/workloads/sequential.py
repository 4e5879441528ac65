"""One request after another: does anything get slower?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cllm_bench.client import Client
from cllm_bench.figures import Figure, Metrics, own
from cllm_bench.peers import Needs
from cllm_bench.prompts import Prompts
from cllm_bench.stats import last_fifth_over_first
from cllm_bench.workloads.over_http import HttpWorkload


@dataclass(frozen=True)
class Sequential(HttpWorkload):
    """Independent short requests, each sent when the one before is done."""

    answer_tokens: int
    requests: int
    prompt_tokens: int = 4

    name = "sequential"
    figures = (
        Figure("last_over_first", "last fifth / first fifth", "", limit=own(1.05)),
        Figure("slope_ms", "slope per request", "ms", compared=False),
    )

    @property
    def title(self) -> str:
        return (
            f"sequential: {self.prompt_tokens} tokens in, {self.answer_tokens} out, {self.requests} requests one by one"
        )

    @property
    def needs(self) -> Needs:
        return Needs(self.name, at_once=1, tokens=self.prompt_tokens + self.answer_tokens)

    def quick(self) -> Sequential:
        return replace(self, requests=10, answer_tokens=4)

    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        texts = [prompts.text(self.prompt_tokens) for _ in range(self.requests)]
        answers = [await client.complete(text, self.answer_tokens) for text in texts]
        return {"last_over_first": last_fifth_over_first([answer.seconds for answer in answers])}
