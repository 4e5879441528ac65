"""Many users, one system prompt: is it computed once?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from cllm_bench.client import Client
from cllm_bench.figures import Figure, Metrics, times_the_peer
from cllm_bench.load import at_most
from cllm_bench.peers import Needs
from cllm_bench.prompts import Prompts
from cllm_bench.workloads.over_http import HttpWorkload


@dataclass(frozen=True)
class Prefix(HttpWorkload):
    """Every user asks one short question of their own under the same long system prompt."""

    users: int = 32
    at_a_time: int = 8
    system_tokens: int = 700
    question_tokens: int = 16
    answer_tokens: int = 32

    name = "prefix"
    figures = (
        Figure("seconds", "total", "s", limit=times_the_peer(8.0)),
        Figure("cached_percent", "prompt from cache", "%", "higher"),
    )

    @property
    def title(self) -> str:
        return (
            f"prefix: {self.users} users, {self.at_a_time} at a time, "
            f"one shared prompt of {self.system_tokens} tokens, {self.answer_tokens} out"
        )

    @property
    def needs(self) -> Needs:
        return Needs(self.name, self.at_a_time, self.system_tokens + self.question_tokens + self.answer_tokens)

    def quick(self) -> Prefix:
        return replace(self, users=8, at_a_time=4, system_tokens=200, answer_tokens=8)

    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        system = {"role": "system", "content": prompts.text(self.system_tokens)}
        questions = [{"role": "user", "content": prompts.text(self.question_tokens)} for _ in range(self.users)]
        await at_most(
            self.at_a_time, [partial(client.chat, [system, question], self.answer_tokens) for question in questions]
        )
        return {}
