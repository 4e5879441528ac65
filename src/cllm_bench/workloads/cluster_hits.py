"""Users of a few system prompts on several replicas: does the router find what is cached?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cllm.backends.fake import FakeBackend
from cllm.config.schema import ResourcesConfig
from cllm.loading.resources import kv_bytes_per_token
from cllm_bench.client import Client
from cllm_bench.clusters import start_cluster, start_fake_server
from cllm_bench.figures import OURS, Figure, Limit, Metrics, Run
from cllm_bench.load import at_most
from cllm_bench.prompts import Prompts
from cllm_bench.servers import Server
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest
from cllm_bench.workloads.cluster_latency import ONE_SERVER

_RANDOM = "random routing"
_LEAST_LOADED = "least loaded"
_ROUTING = {OURS: "prefix", _RANDOM: "random", _LEAST_LOADED: "least-loaded"}
_WITHIN_5_PERCENT = Limit("ratio", 0.95, {ONE_SERVER: 0.95})


@dataclass(frozen=True)
class ClusterHits(LocalWorkload):
    """Every user has a chat that begins with a system prompt. Users take turns in a random order. All replicas
    together have the memory of the one server, which is not enough for all chats."""

    replicas: int = 4
    users: int = 200
    systems: int = 20
    turns: int = 4
    system_tokens: int = 800
    message_tokens: int = 100
    answer_tokens: int = 50
    at_a_time: int = 16
    memory_tokens: int = 96_000
    step_ms: float = 10.0

    name = "cluster-hits"
    needs_model = False
    figures = (
        Figure("hit_percent", "prompt tokens from the cache", "%", "higher", _WITHIN_5_PERCENT),
        Figure("seconds", "total", "s"),
    )

    @property
    def title(self) -> str:
        return (
            f"cluster-hits: {self.replicas} replicas, {self.users} users of {self.systems} system prompts, "
            f"{self.turns} turns each, memory for {self.memory_tokens:,} tokens"
        )

    def quick(self) -> ClusterHits:
        return replace(self, replicas=2, users=12, systems=4, turns=2, step_ms=2.0, memory_tokens=32_000)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        runs = []
        for side in (OURS, ONE_SERVER, _RANDOM, _LEAST_LOADED):
            setup.view.say(f"{self.title}: {setup.shown(side)}")
            async with self._server(side) as server, Client(server.url) as client:
                facts = {"busy_percent_before": await busy_at_rest()}
                await self._drive(client, setup.prompts(f"{self.name} {repeat}"))
                client.raise_for_errors()
            runs.append(Run(side, repeat, _metrics(client), facts, client.answers))
        return runs

    @asynccontextmanager
    async def _server(self, side: str) -> AsyncIterator[Server]:
        if side == ONE_SERVER:
            async with start_fake_server(self._settings(self.memory_tokens)) as server:
                yield server
        else:
            settings = {**self._settings(self.memory_tokens // self.replicas), "cluster.routing": _ROUTING[side]}
            async with start_cluster(self.replicas, settings) as server:
                yield server

    def _settings(self, memory_tokens: int) -> Mapping[str, Any]:
        return {
            "backend.fake.latency_ms": self.step_ms,
            "resources.kv_cache_max_memory_mb": memory_tokens * _token_bytes() / 2**20,
        }

    async def _drive(self, client: Client, prompts: Prompts) -> None:
        systems = [prompts.rough(self.system_tokens) for _ in range(self.systems)]
        chats = [[{"role": "system", "content": systems[user % self.systems]}] for user in range(self.users)]
        order = [user for user in range(self.users) for _ in range(self.turns)]
        prompts.random.shuffle(order)
        messages = [prompts.rough(self.message_tokens) for _ in order]
        one_turn_at_a_time = [asyncio.Lock() for _ in range(self.users)]

        async def turn(user: int, message: str) -> None:
            async with one_turn_at_a_time[user]:
                chat = chats[user]
                chat.append({"role": "user", "content": message})
                answer = await client.chat(chat, self.answer_tokens)
                chat.append({"role": "assistant", "content": answer.text})

        await at_most(self.at_a_time, [partial(turn, user, text) for user, text in zip(order, messages, strict=True)])


def _token_bytes() -> int:
    return kv_bytes_per_token(ResourcesConfig(), FakeBackend().spec)


def _metrics(client: Client) -> Metrics:
    answers = client.answers
    started, finished = min(each.started for each in answers), max(each.finished or 0.0 for each in answers)
    cached, prompt = sum(each.cached_tokens for each in answers), sum(each.prompt_tokens for each in answers)
    return {"hit_percent": 100 * cached / prompt, "seconds": finished - started}
