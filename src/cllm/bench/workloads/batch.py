"""Clients at once, every prompt different: what the machine gives when nothing can be shared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from cllm.bench.client import Client, at_most
from cllm.bench.figures import Figure, times_the_peer
from cllm.bench.prompts import Prompts
from cllm.bench.workloads.base import HttpWorkload, Metrics, latencies, totals


@dataclass(frozen=True)
class Batch(HttpWorkload):
    """Each client sends its next request when its last is answered."""

    clients: int
    requests_each: int
    prompt_tokens: int = 330
    answer_tokens: int = 64

    name = "batch"
    figures = (
        Figure("tokens_per_s", "tokens out per second", "tok/s", "higher", times_the_peer(1.0)),
        Figure("seconds", "total", "s"),
        Figure("ttft_p50_ms", "time to first token, P50", "ms"),
        Figure("ttft_p95_ms", "time to first token, P95", "ms"),
        Figure("inter_token_p50_ms", "inter-token, P50", "ms"),
        Figure("inter_token_p95_ms", "inter-token, P95", "ms"),
        Figure("inter_token_p99_ms", "inter-token, P99", "ms"),
    )

    @property
    def title(self) -> str:
        clients = "1 client" if self.clients == 1 else f"{self.clients} clients"
        return (
            f"batch: {clients} x {self.requests_each} requests, "
            f"{self.prompt_tokens} tokens in, {self.answer_tokens} out"
        )

    @property
    def peer_key(self) -> str:
        return f"batch-{self.clients}"

    def quick(self) -> Batch:
        return replace(self, requests_each=1, answer_tokens=16)

    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        texts = [prompts.text(self.prompt_tokens) for _ in range(self.clients * self.requests_each)]
        answers = await at_most(self.clients, [partial(client.complete, text, self.answer_tokens) for text in texts])
        return totals(answers) | latencies(answers)
