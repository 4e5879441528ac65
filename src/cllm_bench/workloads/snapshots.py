"""Statistics that are read while steps run: does a reader ever wait for a step?"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic, perf_counter, sleep
from typing import TypeVar

from cllm.backends.base import Chunk, StepResult
from cllm.backends.fake import FakeBackend
from cllm.engine.budget import StepBudget
from cllm.engine.loop import Engine
from cllm.engine.params import SamplingParams
from cllm.engine.request import Request, Terms, build_request
from cllm.engine.scheduler import Scheduler
from cllm.engine.stats import EngineSnapshot
from cllm.engine.submission import Submission
from cllm.executor import GIL_SWITCH_S
from cllm.kv.ops import BlockGeometry, BlockOps
from cllm.kv.paged.manager import PagedKVManager
from cllm_bench.figures import OURS, Curve, Figure, Metrics, Run, own
from cllm_bench.stats import percentile
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest

T = TypeVar("T")
Read = Callable[[], EngineSnapshot]

ONE_LOCK = "one lock over the step"
OPEN_LOCK = "one lock, open while computing"
_PAUSE_S = 0.001
"""Between two reads of a thread, where the wait is measured: readers that never rest measure each other."""


@dataclass(frozen=True)
class Snapshots(LocalWorkload):
    """Readers beside an engine whose steps take as long as a model's.

    Ours publishes a value after every step. The other two designs guard the same numbers with a lock, which the engine
    holds for the whole step, or whenever it is not computing.
    """

    readers: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    step_ms: float = 20.0
    running: int = 32
    seconds: float = 0.4

    name = "snapshots"
    needs_model = False
    figures = (
        Figure("waited_permille", "reads that took over half a step, of 1,000", "", limit=own(1.0)),
        Figure("wait_p99_us", "one read, P99, most readers", "us"),
        Figure("wait_max_ms", "longest read, most readers", "ms"),
        Figure("reads_per_s", "reads without a rest, most readers", "/s", "higher"),
        Figure("engine_step_ms", "a step beside the readers", "ms"),
    )

    @property
    def title(self) -> str:
        most = max(self.readers)
        return f"snapshots: up to {most} threads read the statistics of an engine with steps of {self.step_ms:g} ms"

    def quick(self) -> Snapshots:
        return replace(self, readers=(1, 4), step_ms=5.0, seconds=0.1)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        facts = {"busy_percent_before": await busy_at_rest()}
        return [self._measure(side, repeat, facts) for side in (OURS, ONE_LOCK, OPEN_LOCK)]

    def _measure(self, side: str, repeat: int, facts: dict[str, float]) -> Run:
        waits: dict[int, list[float]] = {}
        speed: dict[int, float] = {}
        with self._engine(side) as (engine, read):
            before, begin = engine.snapshot.steps, monotonic()
            for readers in self.readers:
                waits[readers] = _waits(read, readers, self.seconds)
            steps, seconds = engine.snapshot.steps - before, monotonic() - begin
            for readers in self.readers:
                speed[readers] = _reads_per_s(read, readers, self.seconds)
        most = waits[max(self.readers)]
        half = self.step_ms / 2e3
        metrics: Metrics = {
            "waited_permille": 1e3 * sum(wait > half for wait in most) / len(most),
            "wait_p99_us": percentile(most, 99) * 1e6,
            "wait_max_ms": max(most) * 1e3,
            "reads_per_s": speed[max(self.readers)],
            "engine_step_ms": seconds / max(1, steps) * 1e3,
        }
        name = "snapshots" if side == OURS else side
        curves = (
            Curve(
                "How long a read takes",
                name,
                "reading threads",
                "P99 of a read, ms",
                [(readers, percentile(waits[readers], 99) * 1e3) for readers in self.readers],
                "The wait of all but the slowest hundredth of the reads, beside a running engine.",
            ),
            Curve(
                "Reads without a rest",
                name,
                "reading threads",
                "reads per second",
                list(speed.items()),
                "How often all threads together read the statistics when they do nothing else.",
            ),
        )
        return Run(side, repeat, metrics, facts, curves=curves)

    @contextmanager
    def _engine(self, side: str) -> Iterator[tuple[Engine, Read]]:
        """A running engine, and how its statistics are read in this design."""
        lock = threading.Lock()
        backend = FakeBackend(latency_s=self.step_ms / 1e3)
        if side == OPEN_LOCK:
            backend = _OpenBackend(lock, latency_s=self.step_ms / 1e3)
        with backend:
            scheduler = _scheduler(backend, self.running)
            engine = Engine(backend, scheduler, _ignore) if side == OURS else _LockedEngine(backend, scheduler, lock)
            switch = sys.getswitchinterval()
            sys.setswitchinterval(GIL_SWITCH_S)  # as the server has it
            engine.start()
            try:
                for index in range(self.running):
                    engine.submit(_endless_request(index))
                _until(lambda: engine.snapshot.running == self.running)
                yield engine, (lambda: engine.snapshot) if side == OURS else _locked(lock, engine)
            finally:
                engine.stop(0.0)
                sys.setswitchinterval(switch)


class _OpenBackend(FakeBackend):
    """Lets go of the lock while it computes."""

    def __init__(self, lock: threading.Lock, *, latency_s: float) -> None:
        super().__init__(latency_s=latency_s)
        self._lock = lock

    def collect(self, chunks: Sequence[Chunk]) -> StepResult:
        self._lock.release()
        try:
            return super().collect(chunks)
        finally:
            self._lock.acquire()


class _LockedEngine(Engine):
    """Holds one lock over everything it does in a turn."""

    def __init__(self, backend: FakeBackend, scheduler: Scheduler, lock: threading.Lock) -> None:
        super().__init__(backend, scheduler, _ignore)
        self._lock = lock

    def turn(self) -> bool:
        with self._lock:
            return super().turn()


def _locked(lock: threading.Lock, engine: Engine) -> Read:
    def read() -> EngineSnapshot:
        with lock:
            return engine.snapshot

    return read


def _waits(read: Read, readers: int, seconds: float) -> list[float]:
    """What every read of every thread took, in seconds. The threads rest between two reads."""

    def reader(end: float) -> list[float]:
        mine = []
        while (begin := perf_counter()) < end:
            read()
            mine.append(perf_counter() - begin)
            sleep(_PAUSE_S)
        return mine

    return [wait for mine in _together(reader, readers, seconds) for wait in mine]


def _reads_per_s(read: Read, readers: int, seconds: float) -> float:
    """How often all threads together read when none ever rests."""

    def reader(end: float) -> int:
        reads = 0
        while perf_counter() < end:
            read()
            reads += 1
        return reads

    return sum(_together(reader, readers, seconds)) / seconds


def _together(reader: Callable[[float], T], readers: int, seconds: float) -> list[T]:
    """What each of so many threads gives, which start together and end after so many seconds."""
    start = threading.Barrier(readers)

    def run(_: int) -> T:
        start.wait()
        return reader(perf_counter() + seconds)

    with ThreadPoolExecutor(readers) as threads:
        return list(threads.map(run, range(readers)))


def _scheduler(backend: FakeBackend, running: int) -> Scheduler:
    geometry = BlockGeometry(1 << 12, 16)
    backend.allocate(geometry)
    assert isinstance(backend.ops, BlockOps)
    kv = PagedKVManager(backend.ops, geometry, bytes_per_token=8)
    budget = StepBudget(inter_token_s=1.0, max_gap_s=1.0, prompt_only_s=1.0, max_tokens=1 << 12)
    return Scheduler(kv, budget, max_running=running)


def _endless_request(index: int) -> Request:
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    return build_request(
        Submission([index + 1] * 8, params, f"request-{index}"), Terms(1 << 15, 320), arrival=monotonic()
    )


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        sleep(0.005)


def _ignore(outputs: object) -> None:
    pass
