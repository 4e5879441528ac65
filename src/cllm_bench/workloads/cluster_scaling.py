"""More replicas under full load: how many times the throughput of one do they reach?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from cllm_bench.client import Client
from cllm_bench.clusters import start_cluster
from cllm_bench.figures import OURS, Figure, Metrics, Run, times_the_peer
from cllm_bench.load import at_most
from cllm_bench.prompts import Prompts
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest

_ONE = "1 replica"


@dataclass(frozen=True)
class ClusterScaling(LocalWorkload):
    """Replicas have a model's latency but need no processor for it: what is measured is everything around the model.
    There are always more clients than all replicas together run."""

    replicas: int = 4
    step_ms: float = 40.0
    batch: int = 8
    prompt_tokens: int = 300
    answer_tokens: int = 64
    rounds: int = 6

    name = "cluster-scaling"
    needs_model = False
    figures = (Figure("tokens_per_s", "throughput", "tokens/s", "higher", times_the_peer(3.7)),)

    @property
    def title(self) -> str:
        return (
            f"cluster-scaling: 1 and {self.replicas} replicas, each running {self.batch} requests at a time, steps of "
            f"{self.step_ms:g} ms, {self._clients} clients, {self.answer_tokens} tokens out"
        )

    @property
    def _clients(self) -> int:
        return 2 * self.replicas * self.batch

    def quick(self) -> ClusterScaling:
        return replace(self, batch=4, answer_tokens=16, rounds=2)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        runs = []
        for side, replicas in ((OURS, self.replicas), (_ONE, 1)):
            settings = {"backend.fake.latency_ms": self.step_ms, "scheduler.max_running": self.batch}
            async with start_cluster(replicas, settings) as cluster, Client(cluster.url) as client:
                facts = {"busy_percent_before": await busy_at_rest()}
                metrics = await self._drive(client, setup.prompts(f"{self.name} {repeat}"), replicas)
                client.raise_for_errors()
            runs.append(Run(side, repeat, metrics, facts, client.answers))
        return runs

    async def _drive(self, client: Client, prompts: Prompts, replicas: int) -> Metrics:
        """The same work for each replica, however many there are."""
        requests = self.rounds * self.batch * replicas
        texts = [prompts.rough(self.prompt_tokens) for _ in range(requests)]
        start = perf_counter()
        await at_most(self._clients, [partial(client.complete, text, self.answer_tokens) for text in texts])
        return {"tokens_per_s": requests * self.answer_tokens / (perf_counter() - start)}
