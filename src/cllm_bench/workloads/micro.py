"""Bookkeeping without a model: what a step costs besides computing, and how fast the pool and the radix tree are."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

from cllm.backends.base import Chunk, StepResult
from cllm.backends.fake import FakeBackend
from cllm.engine import results as results_module
from cllm.engine.sampling import choose
from cllm.engine.scheduler import Scheduler
from cllm.engine.stepper import Stepper
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.paged.pool import BlockPool
from cllm.kv.radix import RadixTree
from cllm.kv.sequence import KVSequence
from cllm_bench.administered import BLOCK_SIZE, VOCABULARY, add_request, open_scheduler, paged_cache
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest

WINDOW, LOCAL_LAYERS = 128, 4
STATES = 8
"""Blocks that a state is as large as."""


@dataclass(frozen=True)
class Micro(LocalWorkload):
    running: tuple[int, int] = (32, 256)
    prompt_tokens: int = 330
    steps: int = 200
    pool_blocks: int = 65_536
    sequence_blocks: int = 16
    cache_blocks: tuple[int, int] = (10_000, 1_000_000)
    held_tokens: int = 2_000
    admissions: int = 300
    tree_sequences: int = 2_000
    tree_tokens: int = 1_008
    """A whole number of blocks next to 1,000."""

    name = "micro"
    needs_model = False
    figures = (
        Figure("small_step_ms", "scheduler + KV per step, 32 running", "ms", limit=own(0.3)),
        Figure("large_step_ms", "scheduler + KV per step, 256 running", "ms", limit=own(2.0)),
        Figure("window_step_ms", "the same, 32 running, layers with a window beside", "ms"),
        Figure("state_step_ms", "the same, 32 running, layers with a state beside", "ms"),
        Figure("pool_blocks_per_s", "pool: allocate + free", "blocks/s", "higher", own(500_000)),
        Figure("small_admission_us", "admission into a full cache, 10,000 blocks", "us", limit=own(200.0)),
        Figure("large_admission_us", "admission into a full cache, 1,000,000 blocks", "us", limit=own(200.0)),
        Figure("window_admission_us", "the same, 10,000 blocks, layers with a window beside", "us"),
        Figure("state_admission_us", "the same, 10,000 blocks, layers with a state beside", "us"),
        Figure("tree_per_s", "tree: match + insert of 1,000 tokens", "/s", "higher", own(20_000)),
    )

    @property
    def title(self) -> str:
        return "micro: bookkeeping of the paged cache, without backend and sampling"

    def quick(self) -> Micro:
        return replace(
            self, steps=20, pool_blocks=4_096, tree_sequences=200, cache_blocks=(1_000, 10_000), admissions=20
        )

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        facts = {"busy_percent_before": await busy_at_rest()}
        small, large = self.running
        small_cache, large_cache = self.cache_blocks
        metrics: Metrics = {
            "small_step_ms": self.step_ms(small),
            "large_step_ms": self.step_ms(large),
            "window_step_ms": self.step_ms(small, window=WINDOW),
            "state_step_ms": self.step_ms(small, states=STATES),
            "pool_blocks_per_s": self.pool_blocks_per_s(),
            "small_admission_us": self.admission_us(small_cache),
            "large_admission_us": self.admission_us(large_cache),
            "window_admission_us": self.admission_us(small_cache, window=WINDOW),
            "state_admission_us": self.admission_us(small_cache, states=STATES),
            "tree_per_s": self.tree_per_s(),
        }
        return [Run(OURS, repeat, metrics, facts)]

    def step_ms(self, running: int, *, window: int = 0, states: int = 0) -> float:
        """Median milliseconds that a step of `running` decoding sequences takes beside backend and sampling."""
        per_sequence = -(-(self.prompt_tokens + self.steps + BLOCK_SIZE) // BLOCK_SIZE)
        backend = _TimedBackend(vocab_size=VOCABULARY, window=window, local_layers=LOCAL_LAYERS, states=states)
        cells = 1 + LOCAL_LAYERS * bool(window) + states
        with backend, _timed_sampling() as sampling:
            kv = paged_cache(backend, 2 * running * per_sequence * cells)
            scheduler = open_scheduler(kv, running=running, step_tokens=1 << 16)
            stepper = Stepper(backend, scheduler, timer=perf_counter)
            draw = random.Random(running)
            for index in range(running):
                prompt = [draw.randrange(VOCABULARY) for _ in range(self.prompt_tokens)]
                add_request(scheduler, f"request-{index}", prompt)
            while len(scheduler.requests.waiting) or any(
                sequence.remaining > 1 for sequence in scheduler.requests.running
            ):
                _bookkeeping_s(stepper, scheduler, backend, sampling)
            return median(_bookkeeping_s(stepper, scheduler, backend, sampling) for _ in range(self.steps)) * 1e3

    def pool_blocks_per_s(self) -> float:
        """Sequences grow in turn by one block each until the pool is full, then end one by one."""
        pool = BlockPool(self.pool_blocks)
        tables: list[list[int]] = [[] for _ in range(self.pool_blocks // self.sequence_blocks)]
        start = perf_counter()
        for _ in range(self.sequence_blocks):
            for table in tables:
                table += pool.extend(1, 1, table[-1] if table else -1) or []
        for table in tables:
            pool.release(table)
        return self.pool_blocks / (perf_counter() - start)

    def admission_us(self, blocks: int, *, window: int = 0, states: int = 0) -> float:
        """Median microseconds that a prompt's admission takes where every block is cached and others must go."""
        backend = FakeBackend(vocab_size=VOCABULARY, window=window, local_layers=LOCAL_LAYERS, states=states)
        with backend:
            kv = paged_cache(backend, blocks, allocated=False)  # nothing is computed, only administered
            draw = random.Random(blocks)
            while kv.usage().free and not kv.usage().evictions:
                length = draw.randrange(1, min(self.held_tokens, kv.max_tokens))
                if not (window or states):
                    length = min(length, kv.usage().free * BLOCK_SIZE)
                _admission_s(kv, KVSequence(array("i", draw.randbytes(4 * length))))
            prompts = (array("i", draw.randbytes(4 * self.prompt_tokens)) for _ in range(self.admissions))
            return median(_admission_s(kv, KVSequence(prompt)) for prompt in prompts) * 1e6

    def tree_per_s(self) -> float:
        """Sequences in families: each matches the half that it shares, and inserts the rest."""
        keys = list(self._family_keys())
        tree: RadixTree[int] = RadixTree(BLOCK_SIZE, 0, lambda value, units: (value, value))
        start = perf_counter()
        for number, key in enumerate(keys):
            found = tree.find(key)
            tree.add(tree.cut(found), key[found.matched :], number)
        return len(keys) / (perf_counter() - start)

    def _family_keys(self, family: int = 20) -> Iterator[bytes]:
        draw = random.Random(7)
        half = self.tree_tokens // 2 // BLOCK_SIZE * BLOCK_SIZE
        for number in range(self.tree_sequences):
            if number % family == 0:
                shared = array("i", draw.choices(range(50_000), k=half))
            yield (shared + array("i", draw.choices(range(50_000), k=self.tree_tokens - half))).tobytes()


class _TimedBackend(FakeBackend):
    """Knows how long it has computed so far."""

    seconds = 0.0

    def collect(self, chunks: Sequence[Chunk]) -> StepResult:
        start = perf_counter()
        result = super().collect(chunks)
        self.seconds += perf_counter() - start
        return result


class _Sampling:
    """How long choosing tokens took so far."""

    seconds = 0.0


@contextmanager
def _timed_sampling() -> Iterator[_Sampling]:
    """The scheduler calls the sampler in the middle of `apply`; its time is taken apart there."""
    sampling = _Sampling()

    def timed(*args: Any) -> Any:
        start = perf_counter()
        chosen = choose(*args)
        sampling.seconds += perf_counter() - start
        return chosen

    with patch.object(results_module, "choose", timed):
        yield sampling


def _admission_s(kv: PagedKVManager, sequence: KVSequence) -> float:
    """The seconds it takes to admit a sequence, which is then released as if it had been computed."""
    start = perf_counter()
    cached = kv.admit(sequence)
    seconds = perf_counter() - start
    if cached is None:
        raise AssertionError("there was no room in a cache in which nothing runs")
    sequence.num_computed = len(sequence.tokens)
    kv.release(sequence)
    return seconds


def _bookkeeping_s(stepper: Stepper, scheduler: Scheduler, backend: _TimedBackend, sampling: _Sampling) -> float:
    """One step as the engine takes it; the seconds it took beside backend and sampling."""
    before = sampling.seconds + backend.seconds
    start = perf_counter()
    scheduler.requests.expire()
    stepper.advance()
    scheduler.requests.take_outputs()
    scheduler.kv.usage()
    everything = perf_counter() - start
    return everything - (sampling.seconds + backend.seconds - before)
