"""Concurrent clients, all prompts different: raw throughput when nothing can be shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from cllm_bench.client import Client
from cllm_bench.figures import Figure, Metrics, times_the_peer
from cllm_bench.load import at_most
from cllm_bench.peers import Needs
from cllm_bench.prompts import Prompts
from cllm_bench.workloads.over_http import HttpWorkload

_REQUESTS = 16
"""Together, where nothing else is said; but four at least of one client, and one at least of many."""

MANY = 32
"""Clients from which batching must show what it is worth."""


@dataclass(frozen=True)
class Batch(HttpWorkload):
    """Each client sends its next request when its last is answered."""

    clients: int = 1
    prompt_tokens: int = 330
    answer_tokens: int = 64
    requests_each: int = 0
    """0: as many as make the work long enough to measure."""

    name = "batch"
    figures = (
        Figure("tokens_per_s", "tokens out", "tok/s", "higher", times_the_peer(1.0)),
        Figure("seconds", "total", "s"),
    )

    @property
    def each(self) -> int:
        return self.requests_each or min(4, max(1, _REQUESTS // self.clients))

    @property
    def title(self) -> str:
        clients = "1 client" if self.clients == 1 else f"{self.clients} clients"
        return f"batch: {clients} x {self.each} requests, {self.prompt_tokens} tokens in, {self.answer_tokens} out"

    @property
    def all_figures(self) -> Sequence[Figure]:
        if self.clients < MANY:
            return super().all_figures
        speed, *others = super().all_figures
        return [replace(speed, limit=times_the_peer(3.0)), *others]

    @property
    def needs(self) -> Needs:
        return Needs(self.name, at_once=self.clients, tokens=self.prompt_tokens + self.answer_tokens)

    def quick(self) -> Batch:
        return replace(self, clients=4, requests_each=2, prompt_tokens=32, answer_tokens=8)

    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        texts = [prompts.text(self.prompt_tokens) for _ in range(self.clients * self.each)]
        await at_most(self.clients, [partial(client.complete, text, self.answer_tokens) for text in texts])
        return {}
