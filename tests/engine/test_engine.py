"""The engine's thread: submitting, cancelling, failing, recovering and stopping, with real concurrency."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest

from cllm.backends.base import Chunk
from cllm.backends.fake import FakeBackend
from cllm.engine.loop import MAX_FRUITLESS_REBUILDS, REBUILD_ATTEMPTS, Engine
from cllm.engine.observer import ATTEMPTS, Outbox, RequestRecord
from cllm.engine.params import SamplingParams
from cllm.engine.request import FinishReason, Output
from cllm.errors import BackendError, OverloadedError, RequestTimeoutError, ShuttingDownError, StepAbortedError
from cllm.kv.ops import SlotOps
from cllm.kv.sequence import KVSequence
from engine_kit import LIMIT_S, Collector, assert_nothing_left, make_engine, make_request, reference
from pipelined_backend import PipelinedFake

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(params=["paged", "slots", "ahead"])
def running(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, FakeBackend, Collector]]:
    engine, backend, collector = make_engine(request.param)
    engine.start()
    yield engine, backend, collector
    engine.stop(0)
    assert not engine.alive
    assert_nothing_left(engine)


Running = tuple[Engine, FakeBackend, Collector]


def test_answers_are_those_of_a_lone_run(running: Running) -> None:
    engine, _, collector = running
    requests = [make_request(f"question {n}") for n in range(20)]
    for request in requests:
        engine.submit(request)
    for request in requests:
        collector.wait_end(request)
        assert collector.tokens[request.id, 0] == reference(request)


def test_cancel_while_running_frees_everything(running: Running) -> None:
    engine, backend, collector = running
    backend.latency_s = 0.002
    request = make_request("talk on and on", LONG)
    engine.submit(request)
    collector.wait_tokens(request, 3)
    engine.cancel(request.id)
    assert collector.wait_end(request).reason is FinishReason.CANCELLED
    assert request.generated < 200


@pytest.mark.parametrize("running", ["paged", "slots"], indirect=True)
def test_cancel_interrupts_a_long_prompt_step(running: Running) -> None:
    engine, backend, collector = running
    entered = threading.Event()
    backend.latency_s = 10 * LIMIT_S
    backend.faults.before_step = lambda chunks: entered.set()
    request = make_request("p" * 100)
    engine.submit(request)
    assert entered.wait(LIMIT_S)
    while not collector.ends:  # the step may not have begun to wait when the first abort comes
        engine.cancel(request.id)
        threading.Event().wait(0.01)
    assert collector.wait_end(request).reason is FinishReason.CANCELLED
    backend.latency_s = 0.0
    backend.faults.before_step = None


def test_the_numbers_are_as_of_now_while_a_step_is_under_way(running: Running) -> None:
    engine, backend, collector = running
    entered, go_on = threading.Event(), threading.Event()

    def hold(chunks: Sequence[Chunk]) -> None:
        entered.set()
        assert go_on.wait(LIMIT_S)

    backend.faults.before_step = hold
    first = make_request("the first one")
    engine.submit(first)
    assert entered.wait(LIMIT_S)
    late = [make_request(f"late {n}") for n in range(3)]
    for request in late:
        engine.submit(request)
    snapshot, before = engine.snapshot, engine.snapshot.uptime_s
    assert (snapshot.running, snapshot.waiting, snapshot.kv.sequences_running) == (1, 3, 1)
    assert engine.snapshot.uptime_s > before
    go_on.set()
    for request in (first, *late):
        collector.wait_end(request)
    backend.faults.before_step = None


def test_cancelling_what_is_unknown_or_over_does_nothing(running: Running) -> None:
    engine, _, collector = running
    request = make_request("short")
    engine.submit(request)
    collector.wait_end(request)
    engine.cancel(request.id)
    engine.cancel("never heard of")
    again = make_request("still alive")
    engine.submit(again)
    collector.wait_end(again)


def test_a_failing_sequence_does_not_take_the_others_down(running: Running) -> None:
    engine, backend, collector = running
    poison = 7

    def refuse_poison(chunks: Sequence[Chunk]) -> None:
        if any(poison in chunk.tokens for chunk in chunks):
            raise BackendError("a token nobody can compute")

    backend.faults.before_step = refuse_poison
    bad = make_request([1, 2, poison, 4])
    good = [make_request(f"good {n}") for n in range(4)]
    for request in (good[0], good[1], bad, good[2], good[3]):
        engine.submit(request)
    end = collector.wait_end(bad)
    assert end.reason is FinishReason.ERROR and "nobody can compute" in str(end.error)
    for request in good:
        collector.wait_end(request)
        assert collector.tokens[request.id, 0] == reference(request)


def test_a_lost_context_is_rebuilt_and_requests_resume(running: Running) -> None:
    engine, backend, collector = running
    requests = [make_request(f"resume {n}", LONG) for n in range(3)]
    left = iter(range(60))

    def lose_the_context(chunks: Sequence[Chunk]) -> None:
        if next(left, None) is None:
            backend.faults.before_step = None
            raise BackendError("the context is lost", fatal=True)

    backend.faults.before_step = lose_the_context
    for request in requests:
        engine.submit(request)
    for request in requests:
        assert collector.wait_end(request).reason is FinishReason.LENGTH
        assert collector.tokens[request.id, 0] == reference(request)
    assert engine.rebuilds == 1 == backend.faults.rebuilds


def test_a_context_that_stays_broken_fails_requests_not_the_engine(running: Running) -> None:
    engine, backend, collector = running

    def fail_until_rebuilt_thrice(chunks: Sequence[Chunk]) -> None:
        if backend.faults.rebuilds < 3:
            raise BackendError("the context is lost", fatal=True)

    backend.faults.before_step = fail_until_rebuilt_thrice
    request = make_request("unlucky")
    engine.submit(request)
    assert collector.wait_end(request).reason is FinishReason.ERROR
    after = make_request("lucky again")
    engine.submit(after)
    collector.wait_end(after)
    assert collector.tokens[after.id, 0] == reference(after)


def test_an_unexpected_exception_does_not_kill_the_engine(running: Running) -> None:
    engine, backend, collector = running
    failures = iter([RuntimeError("a bug")])

    def fail_once(chunks: Sequence[Chunk]) -> None:
        if error := next(failures, None):
            raise error

    backend.faults.before_step = fail_once
    request = make_request("carry on")
    engine.submit(request)
    collector.wait_end(request)
    assert collector.tokens[request.id, 0] == reference(request)
    assert engine.rebuilds == 1


def test_a_position_mismatch_is_healed_counted_and_invisible() -> None:
    engine, backend, collector = make_engine("slots")
    steps = iter(range(1000))

    def lose_a_position(chunks: Sequence[Chunk]) -> None:
        if next(steps) == 4:
            _write_stray_token(backend, chunks[0])

    backend.faults.before_step = lose_a_position
    engine.start()
    request = make_request("heal me", LONG)
    engine.submit(request)
    collector.wait_end(request)
    assert collector.tokens[request.id, 0] == reference(request)
    assert engine.scheduler.faults.position_mismatches == 1
    assert engine.rebuilds == 0
    engine.stop(0)
    assert_nothing_left(engine)


def test_repeated_mismatches_rebuild_the_context() -> None:
    engine, backend, collector = make_engine("slots")
    steps = iter(range(1000))

    def lose_positions(chunks: Sequence[Chunk]) -> None:
        if next(steps) in (4, 8):
            _write_stray_token(backend, chunks[0])

    backend.faults.before_step = lose_positions
    engine.start()
    request = make_request("heal me twice", LONG)
    engine.submit(request)
    collector.wait_end(request)
    assert collector.tokens[request.id, 0] == reference(request)
    assert engine.scheduler.faults.position_mismatches == 2 and engine.rebuilds == 1
    engine.stop(0)
    assert_nothing_left(engine)


def test_the_queue_is_bounded() -> None:
    engine, backend, collector = make_engine(running=1, max_queue=3)
    gate = threading.Event()
    backend.faults.before_step = lambda chunks: gate.wait(LIMIT_S) and None
    engine.start()
    first = make_request("runs")
    engine.submit(first)
    while engine.scheduler.requests.dequeued < 1:
        threading.Event().wait(0.001)
    waiting = [make_request(f"waits {n}") for n in range(3)]
    for request in waiting:
        engine.submit(request)
    with pytest.raises(OverloadedError, match="3 requests are waiting") as refusal:
        engine.submit(make_request("too many"))
    assert refusal.value.retry_after_s >= 1
    gate.set()
    for request in (first, *waiting):
        collector.wait_end(request)
    engine.submit(make_request("welcome again"))
    engine.stop(LIMIT_S)
    assert_nothing_left(engine)


def test_a_queued_request_times_out_while_others_run() -> None:
    engine, backend, collector = make_engine(running=1)
    backend.latency_s = 0.002
    engine.start()
    engine.submit(make_request("busy", LONG))
    late = make_request("late", arrival=engine._clock(), timeout_s=0.02)
    engine.submit(late)
    end = collector.wait_end(late)
    assert end.reason is FinishReason.TIMEOUT and isinstance(end.error, RequestTimeoutError)
    engine.stop(0)
    assert_nothing_left(engine)


def test_stop_lets_running_requests_end_and_refuses_the_rest() -> None:
    engine, backend, collector = make_engine(running=1)
    backend.latency_s = 0.001
    engine.start()
    running_request, waiting_request = make_request("in time", LONG), make_request("too late")
    engine.submit(running_request)
    collector.wait_tokens(running_request, 1)
    engine.submit(waiting_request)
    engine.stop(LIMIT_S)
    assert collector.ends[running_request.id, 0].reason is FinishReason.LENGTH
    assert isinstance(collector.ends[waiting_request.id, 0].error, ShuttingDownError)
    with pytest.raises(ShuttingDownError):
        engine.submit(make_request("after hours"))
    assert_nothing_left(engine)


@pytest.mark.parametrize("layout", ["paged", "ahead"])
def test_stop_does_not_wait_longer_than_its_grace(layout: str) -> None:
    engine, backend, collector = make_engine(layout)
    backend.latency_s = 60.0
    engine.start()
    request = make_request("never done" * 5)
    engine.submit(request)
    while engine.scheduler.requests.dequeued < 1:
        threading.Event().wait(0.001)
    engine.stop(0.05)
    assert isinstance(collector.ends[request.id, 0].error, ShuttingDownError)
    assert_nothing_left(engine)


def test_stop_does_not_wait_for_its_grace_after_the_last_message() -> None:
    engine, _, _ = make_engine()
    engine.begin_stop(1e6)
    engine.cancel("nobody")
    engine._wake.clear()  # as if all of that had come just after the engine looked
    engine._thread.start()
    engine._thread.join(20)
    assert not engine.alive


def test_stop_waits_for_what_is_under_way_though_nobody_does() -> None:
    """All have gone while a step is computed: its result is collected before the engine ends."""
    engine, backend, _ = make_engine("ahead")
    engine._accepting = True
    request = make_request("talks on", LONG)
    engine.submit(request)
    for _ in range(3):
        engine.turn()
    assert isinstance(backend, PipelinedFake) and backend.under_way == 1
    engine.cancel(request.id)
    engine.begin_stop(5.0)
    engine._drain_inbox()
    assert engine.should_stop
    engine.close_down()
    assert_nothing_left(engine)


def test_a_cache_in_doubt_keeps_nothing_and_tells_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who share a disk with it would write slowly for ever."""
    engine, _, _ = make_engine()
    wound_up: list[float] = []

    def fail() -> None:
        raise BackendError("nothing is certain", fatal=True)

    monkeypatch.setattr(engine.scheduler.doubt, "raise_if_any", fail)
    monkeypatch.setattr(engine.scheduler.kv, "drain", wound_up.append)
    engine.close_down()
    assert wound_up == [0.0]


def test_observers_hear_of_every_end(running: Running) -> None:
    engine, _, collector = running
    records: list[RequestRecord] = []

    class Listener:
        steps = 0

        def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None:
            self.steps += 1

        def on_finished(self, record: RequestRecord) -> None:
            records.append(record)

        def on_eviction(self, count: int, seconds: float) -> None: ...

    listener = Listener()
    engine.scheduler.requests.observers.append(listener)
    request = make_request("observe me", arrival=engine._clock())
    engine.submit(request)
    collector.wait_end(request)
    record = records[0]
    assert record.request_id == request.id and record.prompt_tokens == 10
    assert record.generated_tokens == len(reference(request)) == len(record.inter_token_s) + 1
    assert record.ttft_s is not None and 0 <= record.queued_s <= record.ttft_s <= record.total_s
    assert listener.steps > 0


def test_two_hundred_clients_that_come_go_and_cancel(running: Running) -> None:
    engine, backend, collector = running
    backend.latency_s = 0.0002
    rng = random.Random(5)
    requests = []
    for n in range(200):
        params = SamplingParams(n=rng.choice([1, 1, 1, 3]), seed=n + 1, max_tokens=rng.randint(1, 40))
        prompt = "shared " * rng.randint(0, 10) + str(rng.randint(0, 9)) * rng.randint(1, 30)
        requests.append(make_request(prompt, params))
    barrier = threading.Barrier(8)

    def client(mine: list[int]) -> None:
        own = random.Random(mine[0])
        barrier.wait()
        for n in mine:
            engine.submit(requests[n])
            if own.random() < 0.4:
                engine.cancel(requests[own.choice(mine)].id)

    threads = [threading.Thread(target=client, args=(list(range(k, 200, 8)),)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request in requests:
        for index in range(request.params.n):
            end = collector.wait_end(request, index)
            if end.reason is not FinishReason.CANCELLED:
                assert collector.tokens[request.id, index] == reference(request, index)
    assert sum(engine.scheduler.requests.finished.values()) == 200


def _write_stray_token(backend: FakeBackend, chunk: Chunk) -> None:
    """What the position check is for: the backend holds a token nobody asked it to hold."""
    stray = Chunk(array("i", [9]), chunk.start + 40, False, chunk.slot)
    backend.memory.write(stray, np.array([9], dtype=np.int32))


def test_a_slot_that_lost_its_content_before_a_step_is_healed() -> None:
    engine, backend, collector = make_engine("slots")
    steps = iter(range(1000))

    def lose_everything(chunks: Sequence[Chunk]) -> None:
        assert isinstance(backend.ops, SlotOps)
        if next(steps) == 4:
            backend.ops.remove(chunks[0].slot, 0)
        for chunk in chunks:
            if backend.ops.length(chunk.slot) != chunk.start:
                raise BackendError(f"slot {chunk.slot} does not hold {chunk.start} positions")

    backend.faults.before_step = lose_everything
    engine.start()
    request = make_request("lost and found", LONG)
    engine.submit(request)
    collector.wait_end(request)
    assert collector.tokens[request.id, 0] == reference(request)
    assert engine.scheduler.faults.position_mismatches == 1
    engine.stop(0)
    assert_nothing_left(engine)


# -- faults, one by one; test_every_call_fails.py has them all -----------------------------------------------------


@pytest.mark.parametrize("layout", ["paged", "slots"])
def test_a_failed_admission_loses_nobody(layout: str) -> None:
    engine, _, collector = make_engine(layout)
    admit, failures = engine.scheduler.kv.admit, iter([BackendError("load failed"), KeyError("a bug")])

    def failing(sequence: KVSequence) -> int | None:
        if error := next(failures, None):
            raise error
        return admit(sequence)

    engine.scheduler.kv.admit = failing  # type: ignore[method-assign]
    engine.start()
    requests = [make_request(f"request {n}") for n in range(3)]
    for request in requests:
        engine.submit(request)
    for request in requests:
        collector.wait_end(request)
        assert collector.tokens[request.id, 0] == reference(request)
    engine.cancel(requests[0].id)
    engine.stop(0)
    assert engine.rebuilds == 1
    assert_nothing_left(engine)


def test_who_cannot_be_admitted_at_all_fails_with_the_reason() -> None:
    engine, _, collector = make_engine("slots")
    admit = engine.scheduler.kv.admit

    def failing(sequence: KVSequence) -> int | None:
        if sequence.tokens[0] == ord("!"):
            raise BackendError("this one never")
        return admit(sequence)

    engine.scheduler.kv.admit = failing  # type: ignore[method-assign]
    engine.start()
    bad, good = make_request("! bad"), make_request("good")
    engine.submit(bad)
    engine.submit(good)
    end = collector.wait_end(bad)
    assert end.reason is FinishReason.ERROR and "this one never" in str(end.error)
    collector.wait_end(good)
    assert collector.tokens[good.id, 0] == reference(good)
    engine.stop(0)
    assert engine.rebuilds == 0
    assert_nothing_left(engine)


@pytest.mark.parametrize("layout", ["paged", "slots"])
def test_an_abort_during_recovery_is_nobodys_failure(layout: str) -> None:
    engine, backend, collector = make_engine(layout)
    errors = iter([BackendError("the step of all fails"), StepAbortedError("somebody else was cancelled")])

    def fail(chunks: Sequence[Chunk]) -> None:
        if error := next(errors, None):
            raise error

    backend.faults.before_step = fail
    requests = [make_request(letter * 40) for letter in "xy"]
    for request in requests:
        engine._inbox.append(functools.partial(engine.scheduler.requests.add, request))
    engine.start()
    for request in requests:
        assert collector.wait_end(request).error is None
        assert collector.tokens[request.id, 0] == reference(request)
    engine.stop(0)
    assert_nothing_left(engine)


def test_a_context_that_cannot_be_rebuilt_ends_everything_and_the_engine() -> None:
    engine, backend, collector = make_engine()
    attempts = []

    def fail() -> None:
        attempts.append(1)
        raise BackendError("no memory for a context")

    backend.rebuild = fail  # type: ignore[method-assign]
    backend.faults.fatal, backend.faults.steps_to_fail = True, 1
    running, waiting = make_request("runs"), make_request("waits")
    for request in (running, waiting):
        engine._inbox.append(functools.partial(engine.scheduler.requests.add, request))
    engine.start()
    for request in (running, waiting):
        end = collector.wait_end(request)
        assert end.reason is FinishReason.ERROR and "no memory for a context" in str(end.error)
    engine._thread.join(LIMIT_S)
    assert not engine.alive and not engine.accepting and len(attempts) == REBUILD_ATTEMPTS
    with pytest.raises(ShuttingDownError):
        engine.submit(make_request("too late"))
    engine.stop(0)
    assert_nothing_left(engine)


def test_an_engine_that_fails_in_every_turn_stops_soon() -> None:
    engine, _, collector = make_engine()

    def fail() -> None:
        raise RuntimeError("a bug in every turn")

    engine.scheduler.requests.expire = fail  # type: ignore[method-assign]
    request = make_request("never served")
    engine._inbox.append(functools.partial(engine.scheduler.requests.add, request))
    engine.start()
    assert "a bug in every turn" in str(collector.wait_end(request).error)
    engine._thread.join(LIMIT_S)
    assert not engine.accepting and engine.rebuilds <= MAX_FRUITLESS_REBUILDS + 2


def assert_one_is_served(engine: Engine, collector: Collector, *, rebuilds: int) -> None:
    engine.start()
    request = make_request("all of it")
    engine.submit(request)
    collector.wait_end(request)
    assert collector.tokens[request.id, 0] == reference(request)
    engine.stop(0)
    assert engine.rebuilds == rebuilds
    assert_nothing_left(engine)


def failing_outbox(collector: Collector, errors: Iterable[Exception | None]) -> Outbox:
    """Each delivery fails with the next of `errors`, or is made if there is none."""
    left = iter(errors)

    def deliver(outputs: list[Output]) -> None:
        if error := next(left, None):
            raise error
        collector(outputs)

    return Outbox(deliver)


@pytest.mark.parametrize("failures", [1, 2])
def test_outputs_that_were_not_taken_are_offered_again(failures: int) -> None:
    engine, _, collector = make_engine()
    engine._outbox = failing_outbox(collector, [RuntimeError("the event loop is closed")] * failures)
    assert_one_is_served(engine, collector, rebuilds=0)


def test_an_answer_with_a_hole_ends_with_an_error() -> None:
    engine, _, collector = make_engine()
    engine._outbox = failing_outbox(collector, [None, *[RuntimeError("nobody listens")] * ATTEMPTS])
    engine.start()
    request = make_request("with a hole", LONG)
    engine.submit(request)
    end = collector.wait_end(request)
    assert end.reason is FinishReason.ERROR and "could not be delivered" in str(end.error)
    assert collector.tokens[request.id, 0] == reference(request)[:1]
    engine.stop(0)
    assert_nothing_left(engine)


def test_cancellations_never_interrupt_two_steps_in_a_row() -> None:
    """However many come and go, those who stay get their tokens."""
    engine, backend, collector = make_engine()
    interruptible = []

    def step(chunks: Sequence[Chunk]) -> None:
        interruptible.append(bool(engine._stepper.in_step))
        if engine._stepper.in_step:
            raise StepAbortedError("somebody left")

    backend.faults.before_step = step
    engine.start()
    request = make_request("p" * 100)
    engine.submit(request)
    collector.wait_end(request)
    assert collector.tokens[request.id, 0] == reference(request)
    assert True in interruptible and (True, True) not in itertools.pairwise(interruptible)
    engine.stop(0)


def test_who_comes_during_the_idle_check_is_served_before_it_ends() -> None:
    """A million blocks; the turns are taken by hand, so that it comes exactly then."""
    engine, _, collector = make_engine(tokens=4_000_000)
    engine._accepting = True
    kv = engine.scheduler.kv
    first, second = make_request("q" * 100), make_request("comes in the middle")
    engine.submit(first)
    while engine.turn():
        pass
    slices: list[int] = []
    original = kv.check_in_slices

    def watched() -> Iterator[int]:
        for units in original():
            slices.append(units)
            if len(slices) == 3:
                engine.submit(second)
            yield units

    kv.check_in_slices = watched  # type: ignore[method-assign]
    engine._checked_at = -1e9
    engine.turn()
    assert len(slices) == 3
    while engine.turn():
        pass
    assert len(slices) == 3 and collector.tokens[second.id, 0] == reference(second)
    engine._checked_at = -1e9
    engine.turn()
    assert len(slices) > 900, "undisturbed, it comes to its end"
    assert_nothing_left(engine)


def test_a_broken_account_is_noticed_when_idle_and_renewed() -> None:
    engine, _, collector = make_engine()
    engine._checked_at = -1e9
    kv = engine.scheduler.kv
    kv.arena.prefixes.evictable += 1  # type: ignore[attr-defined]
    assert_one_is_served(engine, collector, rebuilds=1)


def test_a_moment_too_far_away_to_wait_for_is_waited_for_in_parts() -> None:
    engine, _, collector = make_engine()
    engine.scheduler.kv.upkeep_at = lambda: 1e300  # type: ignore[method-assign]
    assert_one_is_served(engine, collector, rebuilds=0)
