"""Pins among running requests: when they are made, what they change, and what they must not."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

from cllm.backends.fake import FakeBackend
from cllm.engine.params import SamplingParams
from cllm.errors import BackendError, ShuttingDownError
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockGeometry, BlockOps, SlotGeometry, SlotOps
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.pins import PinMark
from cllm.kv.sizing import most_bytes
from cllm.kv.slots.manager import SlotKVManager
from cllm.kv.window import Window
from engine_kit import GREEDY, LIMIT_S, make_engine, make_request, reference
from fault_kit import Machine, Rig, fail_every_call
from pipelined_backend import PipelinedFake
from thorough import exhaustive

LAYOUTS = ("paged", "ahead", "slots")
PROMPT = list(range(40, 80))


def run_all(engine: Any) -> None:
    """Turns until nothing is left to compute; the cache is checked after each."""
    for _ in range(5000):
        engine.turn()
        engine.scheduler.kv.check()
        if not (engine.scheduler.requests.has_work or engine._stepper.under_way):
            return
    raise AssertionError("it never ends")


def submit(engine: Any, *requests: Any) -> None:
    engine._accepting = True
    for request in requests:
        engine.submit(request)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompt_is_pinned_when_its_answer_ends(layout: str) -> None:
    engine, _, collector = make_engine(layout)
    mark = PinMark(len(PROMPT))
    request = make_request(PROMPT, pins=[mark])
    submit(engine, request)
    run_all(engine)
    assert mark.pinned_tokens == len(PROMPT) and mark.refusal is None
    assert collector.tokens[request.id, 0] == reference(request)
    usage = engine.snapshot.kv
    assert usage.pins == 1 and usage.referenced == usage.pinned > 0
    for number in range(30):
        submit(engine, make_request([number, *range(100, 200)]))
        run_all(engine)
    again = make_request(PROMPT, pins=[PinMark(len(PROMPT))])
    submit(engine, again)
    run_all(engine)
    assert again.hit.tokens >= len(PROMPT) - 4
    assert collector.tokens[again.id, 0] == reference(again)
    assert engine.snapshot.kv.pins == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_answers_make_one_pin(layout: str) -> None:
    engine, _, _ = make_engine(layout)
    mark = PinMark(len(PROMPT))
    submit(engine, make_request(PROMPT, SamplingParams(n=3, temperature=0.0, max_tokens=5), pins=[mark]))
    run_all(engine)
    assert mark.pin_id and engine.snapshot.kv.pins == 1 and engine.snapshot.kv.pins_refused == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_goes_before_its_prompt_is_computed_pins_nothing(layout: str) -> None:
    engine, _, _ = make_engine(layout, max_step_tokens=8)
    mark = PinMark(len(PROMPT))
    request = make_request(PROMPT, pins=[mark])
    submit(engine, request)
    engine.turn()
    engine.cancel(request.id)
    run_all(engine)
    assert mark.pin_id is None and engine.snapshot.kv.pins == 0


def test_who_goes_later_leaves_its_prompt_pinned() -> None:
    engine, _, _ = make_engine("slots")
    mark = PinMark(len(PROMPT))
    request = make_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True), pins=[mark])
    submit(engine, request)
    for _ in range(10):
        engine.turn()
    engine.cancel(request.id)
    run_all(engine)
    assert mark.pinned_tokens == len(PROMPT)


def test_requests_are_served_though_all_that_may_be_pinned_is() -> None:
    """The pool holds 32 blocks of 4 tokens, of which 8 are pinned; one request needs 30, others come with it."""
    engine, _, collector = make_engine("paged", tokens=128)
    for start in (300, 310):
        submit(engine, make_request([start - 100 + number for number in range(16)], pins=[PinMark(16)]))
        run_all(engine)
    assert engine.snapshot.kv.pinned == 8
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    requests = [make_request(list(range(100)), params, max_context=128), make_request(PROMPT, params)]
    submit(engine, *requests)
    run_all(engine)
    for request in requests:
        assert collector.tokens[request.id, 0] == reference(request)
    assert engine.snapshot.kv.pins < 2  # nothing else was left for the long one


def test_a_window_that_stands_on_a_pinned_prompt_moves_on() -> None:
    engine, _, collector = make_engine("paged", tokens=64)
    mark = PinMark(16)
    submit(engine, make_request(PROMPT[:16], pins=[mark]))
    run_all(engine)
    assert mark.pin_id
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    request = make_request(PROMPT[:30], params, window=Window(4, 48, 4))
    submit(engine, request)
    run_all(engine)
    assert len(collector.tokens[request.id, 0]) == 100 and engine.snapshot.kv.pins == 0


def test_pins_go_with_the_memory_that_held_them() -> None:
    engine, _backend, _ = make_engine("paged")
    submit(engine, make_request(PROMPT, pins=[PinMark(len(PROMPT))]))
    run_all(engine)
    engine._rebuild(BackendError("lost", fatal=True))
    engine.turn()
    assert engine.snapshot.kv.pins == engine.snapshot.kv.referenced == 0


def test_a_pin_that_fails_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, collector = make_engine("slots")
    kv = engine.scheduler.kv

    def fail(*_: object) -> None:
        raise BackendError("the disk is on fire", fatal=True)

    monkeypatch.setattr(kv, "pin", fail)
    request, other = make_request(PROMPT, pins=[PinMark(len(PROMPT))]), make_request(PROMPT[5:])
    submit(engine, request, other)
    run_all(engine)
    for each in (request, other):
        assert collector.tokens[each.id, 0] == reference(each)


def test_a_question_is_answered_on_the_engines_thread() -> None:
    engine, _, _ = make_engine("paged")
    with pytest.raises(ShuttingDownError):
        engine.call(lambda: 1)
    engine.start()
    try:
        assert engine.call(lambda: threading.current_thread().name).result(LIMIT_S) == "cllm-engine"
        with pytest.raises(ZeroDivisionError):
            engine.call(lambda: 1 / 0).result(LIMIT_S)
        request = make_request(PROMPT, GREEDY)
        engine.submit(request)
        assert engine.call(lambda: engine.rebuilds).result(LIMIT_S) == 0
    finally:
        engine.stop(LIMIT_S)


def machine(layout: str) -> Machine:
    """Little memory, of which most may be pinned."""
    backend = (PipelinedFake if layout == "ahead" else FakeBackend)(context_length=96)
    if layout == "slots":
        slots = SlotGeometry(2, 96)
        backend.allocate(slots)
        assert isinstance(backend.ops, SlotOps)
        store = 3 * most_bytes(96, 8)
        kv: KVManager = SlotKVManager(backend.ops, slots, bytes_per_token=8, store_bytes=store, pin_limit=0.7)
    else:
        blocks = BlockGeometry(24, 4)
        backend.allocate(blocks)
        assert isinstance(backend.ops, BlockOps)
        kv = PagedKVManager(backend.ops, blocks, bytes_per_token=8, pin_limit=0.7)
    return Machine(
        backend, kv, lambda request, _: _alone(bytes(request.prompt), request.params.max_tokens), max_running=2
    )


@functools.cache
def _alone(prompt: bytes, max_tokens: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return reference(make_request(memoryview(prompt).cast("i"), params, max_context=96))


def pins_come_and_go(rig: Rig) -> None:
    """Pinned, found again, renewed, over the limit, and in the way of somebody who needs all there is."""
    prefix = "all of them begin like this "
    rig.submit(prefix, 2, pins=[PinMark(16), PinMark(len(prefix))])
    rig.run()
    rig.submit("x" * 40, 2, pins=[PinMark(40)])
    rig.submit(prefix + "one", 2, pins=[PinMark(len(prefix))])
    rig.run()
    rig.submit("y" * 40, 2, pins=[PinMark(40)])
    rig.run()
    rig.submit("z" * 90, 5)
    rig.run()
    rig.submit(prefix + "two", 2)
    rig.run()


@exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("quiet")
def test_whatever_call_fails_while_pins_come_and_go(layout: str) -> None:
    rig = Rig(machine(layout))
    pins_come_and_go(rig)
    assert "kv.pin" in rig.calls.names and (layout != "slots" or "ops.save" in rig.calls.names)
    assert fail_every_call(lambda: machine(layout), pins_come_and_go, ("error", "bug")) > 0
