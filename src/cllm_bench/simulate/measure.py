"""`cllm simulate fit`: real steps of the real engine, timed, and the cost model that they give."""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from cllm.backends.base import Backend, Chunk, StepResult
from cllm.config import load_config
from cllm.engine.loop import Engine
from cllm.engine.params import SamplingParams
from cllm.engine.request import Output, Terms, build_request
from cllm.engine.scheduler import Scheduler
from cllm.engine.submission import Submission
from cllm.errors import BackendError, CLLMError
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockOps, Geometry, SlotOps
from cllm.kv.paged.manager import PagedKVManager
from cllm.loading.parts import load_model
from cllm.loading.text_model import PRELOADED
from cllm.observe.json_option import check_writable
from cllm.work.pool import blocking_workers
from cllm_bench.pages.extras import check_extra
from cllm_bench.simulate.backend import work_of
from cllm_bench.simulate.cost import CostModel, StepWork
from cllm_bench.simulate.fit import StepRecord, fit_cost, median_error

Clock = Callable[[], float]

ANSWER_TOKENS = 24
_KV_MB = 192


class _PendingStep(NamedTuple):
    inner: Any
    started: float
    work: StepWork
    chosen: int


class RecordingBackend(Backend):
    """Another backend, with every step timed. The first one waits until all requests are there."""

    def __init__(self, inner: Backend, clock: Clock) -> None:
        self.traits, self.spec = inner.traits, inner.spec
        self.steps: list[StepRecord] = []
        self.gate = threading.Event()
        self._inner = inner
        self._clock = clock

    def allocate(self, geometry: Geometry) -> None:
        raise BackendError("the memory was allocated before")

    @property
    def kv_bytes(self) -> int:
        return self._inner.kv_bytes

    @property
    def ops(self) -> SlotOps | BlockOps:
        return self._inner.ops

    def submit(self, chunks: Sequence[Chunk]) -> _PendingStep:
        self.gate.wait()
        work, chosen = work_of(chunks), sum(chunk.wanted_logits for chunk in chunks)
        started = self._clock()
        return _PendingStep(self._inner.submit(chunks), started, work, chosen)

    def collect(self, ticket: _PendingStep) -> StepResult:
        """If steps overlap, only the time after the one before counts."""
        result = self._inner.collect(ticket.inner)
        started = max(ticket.started, self.steps[-1].ended) if self.steps else ticket.started
        self.steps.append(StepRecord(started, self._clock(), ticket.work, ticket.chosen))
        return result

    def abort(self) -> None:
        self._inner.abort()

    def rebuild(self) -> None:
        self._inner.rebuild()

    def close(self) -> None:
        """The backend's owner closes it."""


def calibration_prompts(vocabulary: int, seed: int) -> Iterator[list[array[int]]]:
    """One, few and many together, with short and long prompts: every price has steps that tell it from the others."""
    draw, highest = random.Random(seed), min(vocabulary, 32_000) - 1
    for together in (1, 2, 4, 8, 16, 32):
        for length in (24, 160, 480) if together <= 4 else (24, 160):
            yield [array("i", (draw.randint(3, highest) for _ in range(length))) for _ in range(together)]


def timed_steps(
    backend: Backend, scheduler: Scheduler, prompts: Sequence[array[int]], clock: Clock = time.perf_counter
) -> list[StepRecord]:
    """The steps that answer these prompts, which come together."""
    recorder = RecordingBackend(backend, clock)
    unfinished, failed, done = len(prompts), list[Exception](), threading.Event()

    def take(outputs: list[Output]) -> None:
        nonlocal unfinished
        failed.extend(output.error for output in outputs if output.error is not None)
        unfinished -= sum(output.reason is not None for output in outputs)
        if failed or not unfinished:
            done.set()

    engine = Engine(recorder, scheduler, take, max_queue=1 << 20, clock=clock)
    engine.start()
    try:
        for number, prompt in enumerate(prompts):
            engine.submit(
                build_request(
                    Submission(prompt, SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0), str(number)),
                    Terms(1 << 30, backend.spec.n_vocab),  # the length is given, so no token ends an answer
                    arrival=clock(),
                )
            )
        recorder.gate.set()
        done.wait()
    finally:
        recorder.gate.set()
        engine.stop(0)
    if failed:
        raise CLLMError(f"a request failed: {failed[0]}")
    return recorder.steps


def with_other_layers(cost: CostModel, kv: KVManager) -> CostModel:
    """What layers with a window and states take beside the others, where they are kept apart."""
    if not isinstance(kv, PagedKVManager) or kv.arena.local is None:
        return cost
    shape, token_bytes = kv.arena.local.shape, cost.kv_bytes_per_token
    return replace(
        cost,
        window=shape.window,
        window_bytes_per_token=shape.cells * token_bytes,
        state_bytes=shape.state * kv.unit_tokens * token_bytes,
    )


def fit_model(model: str, backend: str, repeats: int, file: Path, seed: int) -> str:
    """Write the fitted cost model; a sentence that says how close it comes."""
    check_extra("scipy", "cllm simulate fit")
    check_writable("FILE", file)
    settings = {
        "model.name": model,
        "backend.type": backend,
        "resources.kv_cache_max_memory_mb": _KV_MB,
        "resources.max_context_length": 1024,
        "log.level": "warning",
        "kv.disk.enabled": False,
    }
    config = load_config(None, settings).config
    with blocking_workers(config.work, PRELOADED) as workers:
        parts = load_model(config, workers)
    facts = parts.text.facts
    runs: list[list[StepRecord]] = []
    with parts.backend, Console(stderr=True).status("") as status:
        for repeat in range(repeats):
            for prompts in calibration_prompts(parts.backend.spec.n_vocab, seed + repeat):
                status.update(f"{len(prompts)} prompts of {len(prompts[0])} tokens, {repeat + 1} of {repeats}")
                runs.append(timed_steps(parts.backend, parts.scheduler, prompts))
    description = f"{facts.name} on {parts.backend.describe()}, fitted from measured steps"
    cost = fit_cost(facts.name, description, runs, kv_bytes_per_token=facts.bytes_per_token)
    cost = with_other_layers(cost, parts.scheduler.kv)
    cost.save(file)
    error = 100 * median_error(cost, [step for run in runs for step in run])
    return f"{file}: {description}; {sum(map(len, runs))} steps, half of them predicted within {error:.1f} %"
