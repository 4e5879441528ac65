"""One request after another: does anything get slower?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from cllm.bench.client import Client
from cllm.bench.figures import Figure, own
from cllm.bench.prompts import Prompts
from cllm.bench.stats import last_fifth_over_first, slope
from cllm.bench.workloads.base import HttpWorkload, Metrics


@dataclass(frozen=True)
class Sequential(HttpWorkload):
    """Independent short requests, each sent when the one before is done."""

    answer_tokens: int
    requests: int
    prompt_tokens: int = 4

    name = "sequential"
    figures = (
        Figure("last_over_first", "last fifth / first fifth", "", limit=own(1.05)),
        Figure("request_ms", "one request, P50", "ms"),
        Figure("slope_us", "slope per request", "us"),
    )

    @property
    def title(self) -> str:
        return (
            f"sequential: {self.prompt_tokens} tokens in, {self.answer_tokens} out, {self.requests} requests one by one"
        )

    def quick(self) -> Sequential:
        return replace(self, requests=self.requests // 10)

    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        texts = [prompts.text(self.prompt_tokens) for _ in range(self.requests)]
        milliseconds = [(await client.complete(text, self.answer_tokens)).seconds * 1e3 for text in texts]
        return {
            "last_over_first": last_fifth_over_first(milliseconds),
            "request_ms": median(milliseconds),
            "slope_us": slope(range(len(milliseconds)), milliseconds) * 1e3,
        }
