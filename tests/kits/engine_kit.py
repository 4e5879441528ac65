"""Small builders that the engine's tests share."""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from cllm.backends.base import Chunk, PromptScores
from cllm.backends.fake import END_TOKEN, FakeBackend
from cllm.engine.budget import StepBudget
from cllm.engine.draw import Constraint
from cllm.engine.loop import Engine
from cllm.engine.params import SamplingParams
from cllm.engine.reading import Embedding, PromptPooling, PromptScoring, Reading
from cllm.engine.request import FinishReason, Output, Request, Terms, build_request
from cllm.engine.resuming import Generated
from cllm.engine.scheduler import Scheduler
from cllm.engine.stepper import Stepper
from cllm.engine.submission import Submission
from cllm.engine.tenant import ANONYMOUS, Tenant
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockGeometry, BlockOps, SlotGeometry, SlotOps
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.pins import PinMark
from cllm.kv.slots.manager import SlotKVManager
from cllm.kv.window import Window
from pipelined_backend import PipelinedFake
from step_of import rows_of, step_of

_numbers = itertools.count()
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
CONTEXT = 256
LIMIT_S = 60.0
"""A guard against hanging, not a demand on speed."""


def make_kv(backend: FakeBackend, layout: str, *, tokens: int = 1024, running: int = 8) -> KVManager:
    if layout == "paged":
        geometry = BlockGeometry(tokens // 4, 4)
        backend.allocate(geometry)
        assert isinstance(backend.ops, BlockOps)
        return PagedKVManager(backend.ops, geometry, bytes_per_token=8, eviction_threshold=0.9, watermark=0.02)
    slots = SlotGeometry(running, CONTEXT)
    backend.allocate(slots)
    assert isinstance(backend.ops, SlotOps)
    return SlotKVManager(backend.ops, slots, bytes_per_token=8, store_bytes=tokens * 40, eviction_threshold=0.9)


def make_scheduler(
    backend: FakeBackend, layout: str = "paged", *, tokens: int = 1024, running: int = 8, **options: Any
) -> Scheduler:
    budget = StepBudget(
        inter_token_s=0.1, max_gap_s=0.25, prompt_only_s=0.5, max_tokens=options.pop("max_step_tokens", 32)
    )
    return Scheduler(make_kv(backend, layout, tokens=tokens, running=running), budget, max_running=running, **options)


class _Started(NamedTuple):
    """A grammar whose one answer has this constraint."""

    constraint: Constraint

    def start(self) -> Constraint:
        return self.constraint


class KeptRequest(Request):
    """Keeps its sequences when it has ended, for tests that compare them with what should be."""

    __slots__ = ()

    def close(self) -> None:
        pass


def make_request(
    prompt: Sequence[int] | str,
    params: SamplingParams = GREEDY,
    *,
    arrival: float = 0.0,
    timeout_s: float = 1e9,
    priority: int = 0,
    max_context: int = CONTEXT,
    request_id: str | None = None,
    window: Window | None = None,
    tenant: Tenant = ANONYMOUS,
    pins: Sequence[PinMark] = (),
    reading: Reading | None = None,
    constraint: Constraint | None = None,
    generated: Generated | None = None,
) -> Request:
    ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    submission = Submission(
        ids,
        params,
        request_id or f"r{next(_numbers)}",
        priority,
        timeout_s,
        tenant,
        pins=pins,
        grammar=None if constraint is None else _Started(constraint),
        embeds=isinstance(reading, PromptPooling),
        generated=generated,
    )
    terms = Terms(max_context, 320, frozenset({END_TOKEN}))
    request = build_request(submission, terms, arrival=arrival, window=window, reading=reading, seed=params.seed or 0)
    request.__class__ = KeptRequest
    return request


def make_reading(kind: str) -> Reading:
    """Of "scores", or of embeddings "last", "mean" or "cls"."""
    return PromptScoring(2) if kind == "scores" else PromptPooling(kind)  # type: ignore[arg-type]


def read_alone(prompt: Sequence[int], kind: str) -> list[Any]:
    """What is read off a prompt that is computed by itself, in one chunk, as plain lists."""
    backend, tokens, reading = FakeBackend(), array("i", prompt), make_reading(kind)
    backend.allocate(SlotGeometry(1, 4096))
    asks = reading.ask(tokens, 0, len(tokens))
    if asks is not None:
        reading.take(0, step_of(backend, [Chunk(tokens, 0, 0, asks=asks)]).read[0])
    return as_lists(reading.result())


def as_lists(read: PromptScores | Embedding) -> list[Any]:
    return [column.tolist() for column in read] if isinstance(read, PromptScores) else read.tolist()


def reference(request: Request, answer: int = 0) -> list[int]:
    """What the request gives when it is alone, uncached, one token after another."""
    from cllm.engine.sampling import TokenChooser, choose

    backend = FakeBackend()
    backend.allocate(SlotGeometry(1, 4096))
    seed = (request.params.seed or 0) + answer
    forbidden = frozenset({END_TOKEN}) if request.params.ignore_eos else frozenset()
    chooser = TokenChooser(
        request.params, request.prompt, end_ids=request.end_ids, forbidden=forbidden, seed=seed, vocab_size=320
    )
    tokens: array[int] = array("i", request.prompt)
    limit = request.sequences[answer].max_length
    if limit == len(tokens):
        return []
    done = 0
    while True:
        logits = rows_of(backend, [Chunk(tokens[done:], done, True)])
        done = len(tokens)
        choice = choose(logits, [(0, chooser)])[0]
        assert choice is not None
        tokens.append(choice.token_id)
        if choice.token_id in request.end_ids or len(tokens) >= limit:
            return tokens[len(request.prompt) :].tolist()


class Collector:
    """Takes an engine's outputs and lets a test wait for ends."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reads: dict[str, list[Any]] = {}
        self.ends: dict[tuple[str, int], Output] = {}
        self._changed = threading.Condition()

    def __call__(self, outputs: list[Output]) -> None:
        with self._changed:
            for output in outputs:
                key = (output.request_id, output.answer)
                if output.read is not None:
                    assert output.request_id not in self.reads and key not in self.tokens
                    self.reads[output.request_id] = as_lists(output.read)
                if output.token_id is not None:
                    self.tokens.setdefault(key, []).append(output.token_id)
                if output.reason is not None:
                    assert key not in self.ends, f"{key} ended twice"
                    self.ends[key] = output
            self._changed.notify_all()

    def wait_end(self, request: Request, answer: int = 0, timeout: float = LIMIT_S) -> Output:
        key = (request.id, answer)
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.ends, timeout), f"{key} never ended"
            return self.ends[key]

    def wait_tokens(self, request: Request, count: int, timeout: float = LIMIT_S) -> None:
        key = (request.id, 0)
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.tokens.get(key, [])) >= count, timeout)


def make_engine(layout: str = "paged", **options: Any) -> tuple[Engine, FakeBackend, Collector]:
    """`layout` may be "ahead": blocks, on a backend that computes ahead."""
    kind = PipelinedFake if layout == "ahead" else FakeBackend
    backend = kind(latency_s=options.pop("latency_s", 0.0))
    layout = "paged" if layout == "ahead" else layout
    collector = Collector()
    max_queue = options.pop("max_queue", 256)
    engine = Engine(backend, make_scheduler(backend, layout, **options), collector, max_queue=max_queue)
    return engine, backend, collector


def assert_nothing_left(engine: Engine) -> None:
    """Invariant 2: nothing outlives its request."""
    scheduler = engine.scheduler
    assert not engine._stepper.under_way
    if isinstance(engine.backend, PipelinedFake):
        assert engine.backend.under_way == 0
    usage = scheduler.kv.usage()
    assert usage.referenced == 0 and usage.sequences_running == 0
    assert not scheduler.requests.running and len(scheduler.requests.waiting) == 0 and not scheduler.requests.by_id
    scheduler.kv.check()


__all__ = [
    "CONTEXT",
    "GREEDY",
    "Collector",
    "FinishReason",
    "as_lists",
    "assert_nothing_left",
    "make_engine",
    "make_reading",
    "make_request",
    "make_scheduler",
    "read_alone",
    "reference",
]


LAYOUTS = ["paged", "slots"]


def step(scheduler: Scheduler, backend: FakeBackend) -> list[Output]:
    """One turn; a token takes 10 ms."""
    Stepper(backend, scheduler, timer=lambda: backend.computed_tokens * 0.010).advance()
    return scheduler.requests.take_outputs()


def run(scheduler: Scheduler, backend: FakeBackend, limit: int = 2000) -> list[Output]:
    outputs: list[Output] = []
    for _ in range(limit):
        if not scheduler.requests.has_work:
            return outputs
        outputs += step(scheduler, backend)
        scheduler.kv.check()
    raise AssertionError("the scheduler does not come to an end")


def answer(outputs: list[Output], request: Request, index: int = 0) -> list[int]:
    return [o.token_id for o in outputs if o[:2] == (request.id, index) and o.token_id is not None]
