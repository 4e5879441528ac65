"""Fail the n-th call: every call from the engine into cache, memory operations, backend, observers and delivery.

A scenario is run once to count its calls, then once for every call and every way of failing. The engine's turns are
taken by hand, with a clock of our own, so that every run is the same up to the call that fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from cllm.backends.base import Backend
from cllm.backends.fake import FakeBackend
from cllm.engine.budget import StepBudget
from cllm.engine.loop import Engine
from cllm.engine.params import SamplingParams
from cllm.engine.plan import Drafter, Drafting
from cllm.engine.request import FinishReason, Request
from cllm.engine.resuming import Generated
from cllm.engine.scheduler import Scheduler
from cllm.engine.tenant import ANONYMOUS
from cllm.errors import BackendError, StepAbortedError
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockBytes
from cllm.kv.paged.manager import PagedKVManager
from engine_kit import Collector, make_reading, make_request, read_alone
from thorough import EXHAUSTIVE

CAUSE = "the n-th call failed"
"""In the message of every injected fault, so that a request's error can be traced to it."""

WAYS: dict[str, Callable[[], Exception]] = {
    "error": lambda: BackendError(CAUSE),
    "fatal": lambda: BackendError(CAUSE, fatal=True),
    "aborted": lambda: StepAbortedError(CAUSE),
    "memory": lambda: MemoryError(CAUSE),
    "bug": lambda: KeyError(CAUSE),
}
AFTER_WAYS = ("error", "bug")
"""The ways in which a call fails after it has had its effect."""

LASTING_WAYS = ("error", "aborted", "bug")
"""The ways in which all further calls fail, too."""

KV_CALLS = (
    "peek", "admit", "arrange", "grow", "commit", "verify", "rewind", "fork", "release", "maintain", "reset", "usage",
    "details", "examine", "remove_range", "shift", "fetch", "drain", "pin", "grow_within_free", "truncate", "meet",
)  # fmt: skip
OPS_CALLS = (
    "copy_blocks", "move_blocks", "release_pages", "prepare_pages", "resident_bytes",
    "length", "shortest", "shortest_saved", "remove", "copy",
    "save", "load", "snapshot", "restore", "resize", "shift", "no_room", "read_blocks", "landing", "land",
)  # fmt: skip
BACKEND_CALLS = ("collect", "rebuild", "abort")
AHEAD_CALLS = ("submit", "collect", "rebuild", "abort")
"""Of a backend that computes ahead: a step is two calls there, and either may fail."""
OBSERVER_CALLS = ("on_step", "on_finished", "on_eviction")
WITHOUT_EFFECT = {f"kv.{name}" for name in ("peek", "verify", "usage", "details", "examine")} | {
    "ops.length",
    "ops.shortest",
    "ops.shortest_saved",
    "ops.resident_bytes",
    "ops.no_room",
    "ops.read_blocks",
}
LISTENERS = ("deliver", "observer.")
"""Calls that only pass something on: if one fails, nothing was passed on."""

HARMLESS = (
    *("observer.", "deliver", "kv.usage", "kv.details", "backend.abort"),
    *("ops.release_pages", "ops.prepare_pages", "ops.resident_bytes"),
    *("ops.read_blocks", "ops.landing", "ops.land"),
)
"""Calls whose failing no request may notice."""

MAX_TURNS = 400
MAX_REBUILDS = 4


@dataclass
class Fault:
    """Which call fails, and how."""

    number: int = 0
    way: str = "bug"
    after: bool = False
    """It fails when it has had its effect."""
    lasting: bool = False
    """From then on all calls of that name fail."""


class Calls:
    """Counts calls, and lets one fail."""

    def __init__(self, fault: Fault) -> None:
        self.names: list[str] = []
        self.counting = True
        self._fault = fault

    @property
    def failed(self) -> str:
        return self.names[self._fault.number - 1] if 0 < self._fault.number <= len(self.names) else ""

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if not self.counting:
                return call(*args, **options)
            self.names.append(name)
            fault = self._fault
            if len(self.names) == fault.number or (fault.lasting and name == self.failed):
                if fault.after and not name.startswith(LISTENERS):
                    call(*args, **options)
                raise WAYS[fault.way]()
            return call(*args, **options)

        return counted

    def wrap_all(self, target: Any, prefix: str, names: Sequence[str]) -> None:
        for name in names:
            if hasattr(target, name):
                setattr(target, name, self.wrap(f"{prefix}.{name}", getattr(target, name)))


class _Ops:
    """Stands between a manager and the backend's operations."""

    def __init__(self, ops: Any, calls: Calls) -> None:
        for name in OPS_CALLS:
            if hasattr(ops, name):
                setattr(self, name, calls.wrap(f"ops.{name}", getattr(ops, name)))
        self.carries_state = getattr(ops, "carries_state", False)
        if isinstance(ops, BlockBytes):
            self.block_bytes, self.reads_wait = ops.block_bytes, ops.reads_wait


class _Observer:
    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None: ...

    def on_finished(self, record: Any) -> None: ...

    def on_eviction(self, count: int, seconds: float) -> None: ...


@dataclass
class Clock:
    """One that stands still until it is set."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Machine:
    """A backend with its cache, empty: what the scenarios are run on."""

    backend: Backend
    kv: KVManager
    expected: Callable[[Request, int], list[int]]
    """What an answer consists of, when nothing else happens."""
    max_running: int = 3
    idle: Callable[[], bool] = lambda: False
    """Does what other threads would. Whether there was anything to do."""
    clock: Clock = field(default_factory=Clock)
    drafter: Drafter | None = None


@dataclass
class Rig:
    """An engine whose turns a scenario takes by hand."""

    machine: Machine
    fault: Fault = field(default_factory=Fault)

    def __post_init__(self) -> None:
        self.calls = Calls(self.fault)
        self.collector = Collector()
        self.requests: list[Request] = []
        self.reads: dict[str, list[Any]] = {}
        """What is to be read off prompts, by request."""
        self.ended_before: set[tuple[str, int]] = set()
        """Answers that had ended where their requests were cut off."""
        self.ended_early: set[str] = set()
        """Requests that the scenario itself cancels, lets time out or shuts down."""
        self.own_faults: list[str] = []
        """What the errors say that the scenario itself causes."""
        self.scripted_rebuilds = 0
        self.raised: list[Exception] = []
        """What clients were told that only cancelled."""
        backend, kv = self.machine.backend, self.machine.kv
        budget = StepBudget(inter_token_s=0.1, max_gap_s=0.25, prompt_only_s=0.5, max_tokens=16)
        drafter = self.machine.drafter
        self.scheduler = Scheduler(
            kv,
            budget,
            max_running=self.machine.max_running,
            drafting=None if drafter is None else Drafting(drafter, backend.traits.most_drafts),
            clock=self.machine.clock,
        )
        deliver = self.calls.wrap("deliver", self.collector)
        self.engine = Engine(backend, self.scheduler, deliver, clock=self.machine.clock)
        observer = _Observer()
        self.calls.wrap_all(observer, "observer", OBSERVER_CALLS)
        self.scheduler.requests.observers.append(observer)
        kv.on_eviction = self.scheduler.requests.observers.evicted
        self.before_step: Callable[[Sequence[Any]], None] = lambda chunks: None
        if isinstance(backend, FakeBackend):
            backend.faults.before_step = lambda chunks: self.before_step(chunks)
        else:
            collect = backend.collect
            backend.collect = lambda chunks: (self.before_step(chunks), collect(chunks))[1]  # type: ignore[method-assign]
        self.calls.wrap_all(backend, "backend", AHEAD_CALLS if backend.traits.depth > 1 else BACKEND_CALLS)
        self.calls.wrap_all(kv, "kv", KV_CALLS)
        owner: Any = kv.arena if isinstance(kv, PagedKVManager) else kv.places
        owner.ops = _Ops(owner.ops, self.calls)
        self.engine._accepting = True

    @property
    def now(self) -> float:
        return self.machine.clock.now

    @now.setter
    def now(self, value: float) -> None:
        self.machine.clock.now = value

    # -- what scenarios do -------------------------------------------------------------------------------------

    def submit(self, prompt: str, max_tokens: int = 4, **options: Any) -> Request:
        timeout_s, priority = options.pop("timeout_s", 1e9), options.pop("priority", 0)
        reads, cuts = options.pop("reads", None), options.pop("cuts", ())
        if reads is not None and reads != "scores":
            max_tokens = 0
        window, pins, tenant = options.pop("window", None), options.pop("pins", ()), options.pop("tenant", ANONYMOUS)
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **options})
        name = f"r{len(self.requests)}"
        limits = {"timeout_s": timeout_s, "priority": priority, "max_context": 96, "window": window, "pins": pins}

        def make(generated: Generated | None = None) -> Request:
            reading = None if reads is None else make_reading(reads)
            given: Any = {"tenant": tenant, "reading": reading, "generated": generated}
            return make_request(prompt, params, arrival=self.now, request_id=name, **given, **limits)

        request = make()
        if cuts and params.max_tokens:
            request = self._cut_off(request, cuts, make)
        if reads is not None and not request.resumed:
            self.reads[name] = read_alone(request.prompt, reads)
        self.requests.append(request)
        self.engine.submit(request)
        if timeout_s < 1e9:
            self.ended_early.add(request.id)
        return request

    def _cut_off(self, request: Request, cuts: Sequence[float], make: Callable[[Generated | None], Request]) -> Request:
        """The same, after so much of each answer was generated elsewhere."""
        generated: list[list[int] | None] = []
        for index in range(request.params.n):
            answer = self.machine.expected(request, index)
            cut = int(cuts[index % len(cuts)] * len(answer))
            generated.append(None if cut == len(answer) else answer[:cut])
        if all(tokens is None for tokens in generated):
            return request
        self.ended_before |= {(request.id, index) for index, tokens in enumerate(generated) if tokens is None}
        return make(generated)

    def cancel(self, request: Request, index: int | None = None) -> None:
        self.ended_early.add(request.id)
        try:
            self.engine.cancel(request.id, index)
        except Exception as error:
            self.raised.append(error)

    def turns(self, count: int) -> bool:
        """So many turns; False if there is nothing left to do before."""
        for _ in range(count):
            self.now += 0.01
            if self.engine.should_stop or not (self.engine.turn() or self.machine.idle()):
                return False
        return True

    def run(self) -> None:
        assert not self.turns(MAX_TURNS), "the engine does not come to an end"

    def idle_check(self) -> None:
        """Long enough after the last one that the engine looks at everything."""
        self.now += 60.0
        self.run()

    def stop(self, grace_s: float) -> None:
        self.ended_early |= {request.id for request in self.requests}
        self.engine.begin_stop(grace_s)

    # -- what must hold after each ----------------------------------------------------------------------------

    def assert_sound(self) -> None:
        self.calls.counting = False
        self.before_step = lambda chunks: None
        engine, scheduler = self.engine, self.scheduler
        if engine._failure is not None:
            assert self.fault.lasting, f"the engine gave up: {engine._failure}"
        if engine.should_stop:
            engine.close_down()
            assert not engine.accepting
        else:
            self.run()
            self._assert_next_is_answered()
        for request in self.requests:
            for index in range(request.params.n):
                self._assert_ended_well(request, index)
            assert not any(sequence.admitted for sequence in request.sequences)
        assert not self.raised
        if scheduler.drafting is not None:
            assert scheduler.drafting.alive
        assert not engine._stepper.under_way
        usage = scheduler.kv.usage()
        assert usage.referenced == usage.pinned and usage.sequences_running == 0
        assert usage.free + usage.evictable + usage.pinned == usage.total
        assert not scheduler.requests.running and len(scheduler.requests.waiting) == 0 and not scheduler.requests.by_id
        assert (
            list(scheduler.requests.waiting) == []
            and scheduler.requests.take_outputs() == []
            and not engine._outbox.waiting
        )
        assert (
            engine._submitted
            == scheduler.requests.dequeued
            == len(self.requests)
            == sum(scheduler.requests.finished.values())
        )
        assert scheduler.requests.prompt_tokens <= sum(len(request.prompt) for request in self.requests)
        answers = sum(request.params.n for request in self.requests) if self.fault.lasting else 0
        assert engine.rebuilds <= MAX_REBUILDS * (1 + answers) + self.scripted_rebuilds
        if not engine.should_stop:
            scheduler.kv.check()

    def _assert_next_is_answered(self) -> None:
        last = self.submit("who comes next?")
        self.run()
        assert self.collector.ends[last.id, 0].reason is FinishReason.LENGTH
        assert self.collector.tokens[last.id, 0] == self.machine.expected(last, 0)

    def _assert_ended_well(self, request: Request, index: int) -> None:
        key = (request.id, index)
        if key in self.ended_before:
            assert key not in self.collector.ends and key not in self.collector.tokens
            return
        assert key in self.collector.ends, f"{key} never ended"
        end = self.collector.ends[key]
        tokens, expected = self.collector.tokens.get(key, []), self.machine.expected(request, index)
        expected = expected[request.sequences[index].n_given :]
        assert tokens == expected[: len(tokens)], f"{key} got other tokens than alone"
        read = self.collector.reads.get(request.id)
        if end.reason in (FinishReason.LENGTH, FinishReason.STOP):
            assert tokens == expected
            # Off the prompt is read with the first answer; another one may go on alone.
            assert index or read == self.reads.get(request.id), f"{key}: its prompt was read otherwise than alone"
        elif end.reason is FinishReason.ERROR:
            causes = [*self.own_faults, *([] if self.calls.failed.startswith(HARMLESS) else [CAUSE])]
            assert any(cause in str(end.error) for cause in causes), f"{key}: {end.error!r} does not name the cause"
        else:
            assert request.id in self.ended_early, f"{key} ended with {end.reason}"


Scenario = Callable[[Rig], None]


def all_faults(calls: Sequence[str], ways: Sequence[str], turn: int = 0) -> Iterator[Fault]:
    """Every call in every way, before and after it takes effect; the first two of each name also permanently.

    As a sample, the same in every run: the first of each name and every eighth after it, each in one of the ways, in
    turn; only the first also after it takes effect, and permanently. `turn` is the way to begin with.
    """
    seen: Counter[str] = Counter()
    lasting = [way for way in LASTING_WAYS if way in ways]
    after = [way for way in AFTER_WAYS if way in ways]
    for number, name in enumerate(calls, 1):
        nth = seen[name]
        seen[name] += 1
        if not EXHAUSTIVE and nth % 8:
            continue
        turn += 1

        def some(of: Sequence[str], turn: int = turn) -> Sequence[str]:
            return of if EXHAUSTIVE or not of else [of[turn % len(of)]]

        yield from (Fault(number, way) for way in some(ways))
        if nth < (2 if EXHAUSTIVE else 1) and name != "deliver":  # nobody can be told anything if that fails for good
            yield from (Fault(number, way, lasting=True) for way in some(lasting))
        # What only looks has no effect.
        if (EXHAUSTIVE or nth == 0) and name not in WITHOUT_EFFECT and not name.startswith(LISTENERS):
            yield from (Fault(number, way, after=True) for way in some(after))


def fail_every_call(make: Callable[[], Machine], scenario: Scenario, ways: Sequence[str] = tuple(WAYS)) -> int:
    """Returns how many runs there were with a call that failed."""
    rig = Rig(make())
    scenario(rig)
    calls = list(rig.calls.names)
    rig.assert_sound()
    runs = 0
    for fault in all_faults(calls, ways, crc32(scenario.__name__.encode())):
        rig = Rig(make(), fault)
        try:
            scenario(rig)
            assert len(rig.calls.names) >= fault.number, "the run differs before the fault"
            rig.assert_sound()
        except Exception as error:
            where = f"call {fault.number} of {len(calls)}, {calls[fault.number - 1]}"
            raise AssertionError(f"{error} (with {where}, failing: {fault})") from error
        runs += 1
    return runs
