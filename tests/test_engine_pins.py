"""Pins among running requests: when they are made, what they change, and what they must not."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cllm.engine.params import SamplingParams
from cllm.errors import BackendError, ShuttingDownError
from cllm.kv.pins import PinMark
from cllm.kv.window import Window
from engine_kit import GREEDY, make_engine, make_request, reference

LAYOUTS = ("paged", "ahead", "slots")
PROMPT = list(range(40, 80))


def run_all(engine: Any) -> None:
    """Turns until nothing is left to compute; the cache is checked after each."""
    for _ in range(5000):
        engine.turn()
        engine.scheduler.kv.check()
        if not (engine.scheduler.has_work or engine._stepper.under_way):
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
    assert again.cached_tokens >= len(PROMPT) - 4
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
        engine.ask(lambda: 1)
    engine.start()
    try:
        assert engine.ask(lambda: threading.current_thread().name).result(10) == "cllm-engine"
        with pytest.raises(ZeroDivisionError):
            engine.ask(lambda: 1 / 0).result(10)
        request = make_request(PROMPT, GREEDY)
        engine.submit(request)
        assert engine.ask(lambda: engine.rebuilds).result(10) == 0
    finally:
        engine.stop(5)
