"""Rolling windows on the fake backend: an answer is the same alone, among others, however it is cut, cached or lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.backends.fake import FakeBackend
from cllm.engine.params import SamplingParams
from cllm.engine.request import FinishReason, Output
from cllm.engine.scheduler import Scheduler
from cllm.kv.window import Window
from engine_kit import answer, make_request, make_scheduler, run, step
from window_kit import windowed_reference

LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)


def window_of(scheduler: Scheduler, keep: int = 5, recent: int = 24) -> Window:
    return Window.fit(keep, recent, scheduler.kv.unit_tokens)


# --- when tokens go ---


@settings(deadline=None)
@given(
    keep=st.integers(0, 300),
    recent=st.integers(1, 5000),
    unit=st.sampled_from([1, 4, 16, 1024]),
    position=st.integers(0, 100_000),
)
def test_a_window_holds_what_was_asked_for_and_no_more_than_its_capacity(
    keep: int, recent: int, unit: int, position: int
) -> None:
    window = Window.fit(keep, recent, unit)
    assert window.keep >= keep and window.recent >= recent
    assert all(tokens % unit == 0 for tokens in (window.keep, window.recent, window.step))
    assert window.keep < keep + unit and window.recent < recent + unit and window.step <= max(256, unit)
    dropped = window.dropped_at(position)
    assert dropped % window.step == 0 and dropped <= max(0, position - window.keep)
    assert position - dropped < window.capacity
    if dropped:
        assert position - dropped - window.keep >= window.recent
    until = window.until_drop(position)
    assert until >= 1
    assert window.dropped_at(position + until - 1) == dropped
    assert window.dropped_at(position + until) == dropped + window.step


# --- equality ---


def test_alone_and_among_others(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout)
    window = window_of(scheduler)
    windowed = [make_request(f"prompt number {n} " * (n + 1), LONG, window=window) for n in range(4)]
    others = [make_request(f"prompt number {n} " * (n + 1)) for n in range(4)]
    for request in (*windowed, *others):
        scheduler.requests.add(request)
    outputs = run(scheduler, backend)
    for request in (*windowed, *others):
        assert answer(outputs, request) == windowed_reference(request, layout)
    assert all(len(answer(outputs, request)) == 120 for request in windowed)
    assert scheduler.kv.dropped_tokens > 0


@pytest.mark.parametrize("max_step_tokens", [1, 3, 7, 16, 64])
def test_a_prompt_longer_than_the_window_streams_through_it(layout: str, max_step_tokens: int) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout, max_step_tokens=max_step_tokens)
    window = window_of(scheduler)
    request = make_request([97 + n * n % 23 for n in range(700)], LONG, window=window)
    scheduler.requests.add(request)
    most = 0
    outputs: list[Output] = []
    while scheduler.requests.has_work:
        outputs += step(scheduler, backend)
        scheduler.kv.check()
        usage = scheduler.kv.usage()
        most = max(most, usage.referenced * usage.unit_tokens)
    assert answer(outputs, request) == windowed_reference(request, layout)
    # Full blocks before the first drop are shared; what is copied out of the tree is held once more for no step.
    assert most <= window.capacity


def test_memory_is_constant(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout, tokens=256)
    window = window_of(scheduler)
    request = make_request("once upon a time", SamplingParams(max_tokens=1500, ignore_eos=True, seed=1), window=window)
    scheduler.requests.add(request)
    held = []
    while scheduler.requests.has_work:
        step(scheduler, backend)
        if request.sequences[0].num_computed > window.capacity:
            usage = scheduler.kv.usage()
            held.append(usage.referenced * usage.unit_tokens)
    assert window.capacity - window.step <= min(held[:-1]) and max(held) <= window.capacity
    assert request.reason is FinishReason.LENGTH and request.generated == 1500


def test_preempted_and_recomputed() -> None:
    """Six windows of 36 tokens in memory for 128."""
    backend = FakeBackend()
    scheduler = make_scheduler(backend, tokens=128)
    window = window_of(scheduler)
    requests = [make_request(f"{n} and so on", LONG, window=window) for n in range(6)]
    for request in requests:
        scheduler.requests.add(request)
    outputs = run(scheduler, backend, limit=20_000)
    assert scheduler.requests.preemptions > 0
    for request in requests:
        assert answer(outputs, request) == windowed_reference(request, "paged")


def test_memory_of_one_window_is_enough() -> None:
    """The path cannot be copied out of the tree: it is taken along, though others once branched off from it."""
    backend = FakeBackend()
    scheduler = make_scheduler(backend, tokens=64)
    window = Window.fit(4, 40, 4)
    assert window.capacity == 56
    prompt = list(b"the same beginning for all of them")
    for tail in (b" one", b" two"):
        scheduler.requests.add(make_request([*prompt[:16], *tail]))
    run(scheduler, backend)
    request = make_request(prompt, LONG, window=window)
    scheduler.requests.add(request)
    outputs = run(scheduler, backend)
    assert answer(outputs, request) == windowed_reference(request, "paged")
    assert scheduler.requests.preemptions == 0


def test_what_was_computed_before_the_first_drop_is_found_by_others(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout)
    window = window_of(scheduler)
    prompt = [97 + n * n % 23 for n in range(100)]
    first, second = (make_request(prompt, LONG, window=window) for _ in range(2))
    plain = make_request(prompt)
    outputs = []
    for request in (first, second, plain):
        scheduler.requests.add(request)
        outputs += run(scheduler, backend)
        assert answer(outputs, request) == windowed_reference(request, layout)
    # A slot holds one sequence: when tokens were dropped from it, only its beginning is left to share.
    assert (first.hit.tokens, second.hit.tokens, plain.hit.tokens) == (
        (0, window.capacity - 4, window.capacity) if layout == "paged" else (0, 0, 0)
    )


def test_a_cached_prefix_is_used_and_stays_as_it_is(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout)
    prompt = [97 + n * n % 23 for n in range(60)]
    plain, again = (make_request([*prompt, 99, 98, 97, 96], LONG) for _ in range(2))
    windowed = make_request([*prompt, 100, 101], LONG, window=window_of(scheduler, recent=60))
    outputs = []
    for request in (plain, windowed, again):
        scheduler.requests.add(request)
        outputs += run(scheduler, backend)
    assert windowed.hit.tokens == 60
    assert again.hit.tokens >= 60
    for request in (plain, windowed, again):
        assert answer(outputs, request) == windowed_reference(request, layout)


@pytest.mark.parametrize("prompt_tokens", [20, 90])
def test_several_answers(layout: str, prompt_tokens: int) -> None:
    """Forked before anything was dropped, and after."""
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout)
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=90, ignore_eos=True)
    request = make_request([97 + n % 7 for n in range(prompt_tokens)], params, window=window_of(scheduler))
    scheduler.requests.add(request)
    outputs = run(scheduler, backend)
    for index in range(4):
        assert answer(outputs, request, index) == windowed_reference(request, layout, index)


def test_nobody_waits_for_a_prompt_that_streams_through_a_window() -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, max_step_tokens=8)
    window = window_of(scheduler)
    prompt = [97 + n * n % 23 for n in range(150)]
    first, second = (make_request(prompt, LONG, window=window) for _ in range(2))
    scheduler.requests.add(first)
    while first.sequences[0].num_computed <= window.capacity:
        step(scheduler, backend)
    scheduler.requests.add(second)
    step(scheduler, backend)
    assert first.sequences[0].remaining > 1 and second.sequences[0].running
    outputs = run(scheduler, backend)
    assert answer(outputs, second) == windowed_reference(second, "paged")


def test_without_a_window_the_context_is_the_end(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout)
    request = make_request("a" * 60, SamplingParams(max_tokens=500, ignore_eos=True), max_context=100)
    scheduler.requests.add(request)
    outputs = run(scheduler, backend)
    assert outputs[-1].reason is FinishReason.LENGTH and len(answer(outputs, request)) == 40


def test_an_answer_of_no_given_length_has_room_for_a_whole_context() -> None:
    window = Window.fit(4, 40, 4)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    assert make_request("a" * 60, params, max_context=100, window=window).sequences[0].max_length == 160
    assert make_request("a" * 60, params, max_context=100).sequences[0].max_length == 100


# --- anything, in any order ---
