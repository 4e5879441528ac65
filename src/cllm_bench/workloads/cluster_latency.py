"""A cluster of one replica beside one server: what do the ingress and the router add?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from cllm_bench.client import Client
from cllm_bench.clusters import start_cluster, start_fake_server
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.prompts import Prompts
from cllm_bench.response import TimedResponse
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest

ONE_SERVER = "one server"


@dataclass(frozen=True)
class ClusterLatency(LocalWorkload):
    """Both run all the time and answer in turn, so that both see the same machine."""

    step_ms: float = 10.0
    prompt_tokens: int = 500
    first_tokens: int = 60
    streams: int = 6
    answer_tokens: int = 200

    name = "cluster-latency"
    needs_model = False
    figures = (
        Figure("first_ms", "first token, P50", "ms"),
        Figure("token_ms", "per token", "ms"),
        Figure("first_added_ms", "added to the first token, P50", "ms", limit=own(8.0)),
        Figure("token_added_ms", "added per token", "ms", limit=own(0.5)),
    )

    @property
    def title(self) -> str:
        return (
            f"cluster-latency: one replica, steps of {self.step_ms:g} ms, {self.first_tokens} requests for a first "
            f"token, {self.streams} streams of {self.answer_tokens} tokens"
        )

    def quick(self) -> ClusterLatency:
        return replace(self, first_tokens=8, streams=2, answer_tokens=50)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        settings = {"backend.fake.latency_ms": self.step_ms}
        async with (
            start_cluster(1, settings) as cluster,
            start_fake_server(settings) as server,
            Client(cluster.url) as ours,
            Client(server.url) as theirs,
        ):
            prompts = setup.prompts(f"{self.name} {repeat}")
            await self._ask(ours, theirs, prompts, 5, 2)  # the first requests open connections and fill caches
            facts = {"busy_percent_before": await busy_at_rest()}
            firsts = await self._ask(ours, theirs, prompts, self.first_tokens, 2)
            streams = await self._ask(ours, theirs, prompts, self.streams, self.answer_tokens)
            ours.raise_for_errors()
            theirs.raise_for_errors()
        our, their = _metrics(firsts[0], streams[0]), _metrics(firsts[1], streams[1])
        added = {
            "first_added_ms": our["first_ms"] - their["first_ms"],
            "token_added_ms": our["token_ms"] - their["token_ms"],
        }
        return [Run(OURS, repeat, our | added, facts), Run(ONE_SERVER, repeat, their)]

    async def _ask(
        self, ours: Client, theirs: Client, prompts: Prompts, requests: int, tokens: int
    ) -> tuple[list[TimedResponse], list[TimedResponse]]:
        answers: tuple[list[TimedResponse], list[TimedResponse]] = ([], [])
        for number in range(requests):
            prompt = prompts.rough(self.prompt_tokens)
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                answers[side].append(await (ours, theirs)[side].complete(prompt, tokens))
        return answers


def _metrics(firsts: list[TimedResponse], streams: list[TimedResponse]) -> Metrics:
    return {
        "first_ms": median(answer.ttft for answer in firsts) * 1e3,
        "token_ms": median(answer.seconds_per_token for answer in streams) * 1e3,
    }
