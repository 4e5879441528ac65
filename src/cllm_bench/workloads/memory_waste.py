"""How much KV memory is reserved but not needed, in blocks and in one piece per sequence?"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockGeometry
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.sequence import KVSequence
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.simulate.backend import SimulatedBlocks
from cllm_bench.simulate.contiguous import ContiguousKVManager, Tidying
from cllm_bench.workloads.base import LocalWorkload, Setup

RESERVED = "contiguous, longest answer reserved"
COMPACTED = "contiguous, compacted"


@dataclass(frozen=True)
class MemoryWaste(LocalWorkload):
    """The real managers under the same load; only the model is missing, which would not change where anything lies.

    Lengths are log-normal, as those in public traces of chats about are. No two prompts share a prefix.
    """

    running: int = 64
    requests: int = 2000
    prompt_tokens: int = 100
    """In the middle."""
    prompt_spread: float = 0.9
    answer_tokens: int = 150
    answer_spread: float = 0.8
    answer_most: int = 1024
    """What a request may ask for; most answers end long before."""
    memory_tokens: int = 32_768
    block_size: int = 16

    name = "memory-waste"
    needs_model = False
    figures = (
        Figure("waste_percent", "taken and not needed", "%", limit=own(4.0)),
        Figure("worst_percent", "the same, worst step", "%"),
        Figure("running", "sequences at once, on average", "", "higher"),
        Figure("steps", "steps until the last one began", ""),
        Figure("preempted", "sequences thrown out and computed again", ""),
        Figure("moved_mb", "moved to make room", "MB"),
    )

    @property
    def title(self) -> str:
        return (
            f"memory-waste: {self.requests:,} requests of mixed lengths, {self.running} at once, "
            f"in memory for {self.memory_tokens:,} tokens, blocks of {self.block_size}"
        )

    def quick(self) -> MemoryWaste:
        return replace(self, requests=60, running=8, memory_tokens=4096)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        sides = {OURS: self._paged, RESERVED: self._reserved, COMPACTED: self._compacted}
        runs = []
        for side, make in sides.items():
            setup.view.say(f"{self.title}: {side}")
            load = _Load(make(), deque(self._requests(repeat)), self.running)
            runs.append(Run(side, repeat, load.run()))
        return runs

    def _requests(self, repeat: int) -> Iterator[_Request]:
        rng = np.random.default_rng(repeat)
        prompts = rng.lognormal(math.log(self.prompt_tokens), self.prompt_spread, self.requests)
        answers = rng.lognormal(math.log(self.answer_tokens), self.answer_spread, self.requests)
        longest = self.memory_tokens - self.answer_most
        token = count(1)
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = array("i", (next(token) for _ in range(int(min(max(prompt, 1), longest)))))
            yield _Request(KVSequence(tokens), int(min(max(answer, 1), self.answer_most)))

    def _paged(self) -> KVManager:
        geometry = BlockGeometry(self.memory_tokens // self.block_size, self.block_size)
        return PagedKVManager(SimulatedBlocks(), geometry, bytes_per_token=_BYTES_PER_TOKEN)

    def _reserved(self) -> KVManager:
        return self._contiguous("none", lambda sequence: len(sequence.tokens) + self.answer_most)

    def _compacted(self) -> KVManager:
        return self._contiguous("compact", lambda sequence: len(sequence.tokens))

    def _contiguous(self, tidying: Tidying, reserve: Callable[[KVSequence], int]) -> KVManager:
        return ContiguousKVManager(
            self.memory_tokens, bytes_per_token=_BYTES_PER_TOKEN, tidying=tidying, reserve=reserve
        )


_BYTES_PER_TOKEN = 23_040
"""SmolLM2's, in f16."""


@dataclass(slots=True)
class _Request:
    sequence: KVSequence
    left: int
    """Tokens to generate."""


@dataclass(slots=True)
class _Load:
    """Requests in order, as many at once as there is room for, up to `most`; a token of each in every step."""

    manager: KVManager
    waiting: deque[_Request]
    most: int
    running: list[_Request] = field(default_factory=list)
    preempted: int = 0

    def run(self) -> Metrics:
        taken = needed = steps = at_once = 0
        worst = 0.0
        while self.waiting:  # then fewer and fewer run
            self._admit()
            for request in list(self.running):
                self._decode(request)
            usage = self.manager.usage()
            now = usage.referenced * usage.unit_tokens
            used = sum(request.sequence.num_computed for request in self.running)
            taken, needed, steps, at_once = taken + now, needed + used, steps + 1, at_once + len(self.running)
            if now:
                worst = max(worst, 1 - used / now)
        return {
            "waste_percent": 100 * (1 - needed / taken),
            "worst_percent": 100 * worst,
            "running": at_once / steps,
            "steps": steps,
            "preempted": self.preempted,
            "moved_mb": self.manager.usage().moved_bytes / 1e6,
        }

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.most:
            request = self.waiting[0]
            if self.manager.admit(request.sequence) is None:
                return
            self.waiting.popleft()
            self.running.append(request)

    def _decode(self, request: _Request) -> None:
        """All that is missing of the sequence is computed, and a token follows."""
        sequence = request.sequence
        while request in self.running:
            missing = len(sequence.tokens) - sequence.num_computed
            if self.manager.grow(sequence, missing):
                sequence.num_computed += missing
                self.manager.commit(sequence)
                break
            self._preempt(self.running[-1])
        else:
            return
        sequence.tokens.append(0)
        request.left -= 1
        if not request.left:
            self.running.remove(request)
            self.manager.release(sequence)

    def _preempt(self, request: _Request) -> None:
        self.running.remove(request)
        self.manager.release(request.sequence, keep=False)
        self.waiting.appendleft(request)
        self.preempted += 1
