"""The router of a cluster alone: how fast it decides and how much memory it takes when replicas have much cached."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from time import thread_time

from cllm.kv.block_names import NAME_BYTES
from cllm.kv.events import KVEvent
from cllm.routing.index import PrefixIndex
from cllm.routing.policy import PrefixPolicy, ReplicaStats
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.stats import percentile
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Router(LocalWorkload):
    """Conversations that begin with one of a few system prompts. Half of the requests continue one of them, a quarter
    begins a new one, a quarter shares nothing.

    Times are of the CPU: the router waits for nothing, so other work on the machine says nothing about it."""

    replicas: int = 64
    blocks: int = 1_000_000
    prompt_blocks: int = 256
    system_blocks: int = 64
    systems: int = 20
    decisions: int = 10_000

    name = "router"
    needs_model = False
    figures = (
        Figure("decisions_per_s", "decisions", "/s", "higher", own(5_000.0)),
        Figure("decision_p99_us", "one decision, P99", "us"),
        Figure("memory_mb", "memory at its highest", "MB", limit=own(300.0)),
        Figure("blocks_per_s", "blocks learnt from events", "blocks/s", "higher"),
    )

    @property
    def title(self) -> str:
        return f"router: {self.replicas} replicas with {self.blocks:,} blocks, prompts of {self.prompt_blocks} blocks"

    def quick(self) -> Router:
        return replace(self, replicas=8, blocks=20_000, decisions=500)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        facts = {"busy_percent_before": await busy_at_rest()}
        tracemalloc.start()
        try:
            self._fill()
            memory = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        start = thread_time()
        policy = self._fill()
        filled_s = thread_time() - start
        assert policy.index is not None
        metrics = self._decide(policy, repeat) | {
            "memory_mb": memory / 1e6,
            "blocks_per_s": policy.index.blocks / filled_s,
        }
        return [Run(OURS, repeat, metrics, facts)]

    def _fill(self) -> PrefixPolicy:
        """A router that has heard of all blocks, request by request."""
        policy = PrefixPolicy(block_tokens=BLOCK_TOKENS, index=PrefixIndex(self.blocks))
        index = policy.index
        numbers = dict.fromkeys((f"replica-{number}" for number in range(self.replicas)), 0)
        for replica in numbers:
            policy.add(replica, 0.0)
            index.snapshot(replica, 0, [name for system in range(self.systems) for name in self._system(system)], 0.0)
        replicas = list(numbers)
        for chat in range(self._chats):
            replica = replicas[chat % self.replicas]
            numbers[replica] += 1
            index.apply(replica, [KVEvent(numbers[replica], "stored", tuple(self._chat(chat)))], 0.0)
        return policy

    @property
    def _chats(self) -> int:
        left = self.blocks - self.replicas * self.systems * self.system_blocks
        return left // (self.prompt_blocks - self.system_blocks)

    def _decide(self, policy: PrefixPolicy, seed: int) -> Metrics:
        draw = Random(seed)
        tokens = self.prompt_blocks * BLOCK_TOKENS
        seconds = []
        moment = 0.0
        for number, names in enumerate(self._prompts(draw)):
            start = thread_time()
            if number % (100 * self.replicas) == 0:
                for replica in policy.replicas:
                    policy.report(replica, ReplicaStats(draw.randrange(2000), draw.randrange(20)), moment)
            policy.choose(names, tokens, now=moment)
            seconds.append(thread_time() - start)
            moment += 1e-4
        return {
            "decisions_per_s": len(seconds) / sum(seconds),
            "decision_p99_us": percentile(seconds, 99) * 1e6,
        }

    def _prompts(self, draw: Random) -> Iterator[list[bytes]]:
        for number in range(self.decisions):
            system = draw.randrange(self.systems)
            if number % 2:
                chat = draw.randrange(self._chats)
                yield self._system(chat % self.systems) + self._chat(chat)
            elif number % 4:
                yield self._system(system) + self._chat(self._chats + number)
            else:
                yield self._system(self.systems + number) + self._chat(self._chats + number)

    def _system(self, number: int) -> list[bytes]:
        return _names(f"system {number}", self.system_blocks)

    def _chat(self, number: int) -> list[bytes]:
        return _names(f"chat {number}", self.prompt_blocks - self.system_blocks)


def _names(seed: str, count: int) -> list[bytes]:
    data = Random(seed).randbytes(count * NAME_BYTES)
    return [data[start : start + NAME_BYTES] for start in range(0, len(data), NAME_BYTES)]
