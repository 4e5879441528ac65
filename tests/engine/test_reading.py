"""What is read off prompts while they are computed: the same whatever is cached, shared, preempted or beside it."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from cllm.backends.base import Chunk, PromptScores
from cllm.backends.fake import END_TOKEN
from cllm.backends.scoring import score_rows
from cllm.engine.budget import StepBudget
from cllm.engine.params import ContextWindow, SamplingParams
from cllm.engine.reading import PromptPooling, PromptScoring, normalised
from cllm.engine.scheduler import Scheduler
from cllm.engine.stepper import Stepper
from cllm.errors import BackendError, InvalidRequestError, StepAbortedError
from engine_kit import (
    GREEDY,
    LIMIT_S,
    FinishReason,
    as_lists,
    assert_nothing_left,
    make_engine,
    make_reading,
    make_request,
    read_alone,
    reference,
)
from state_slots_kit import state_slots

LAYOUTS = ["paged", "slots", "ahead"]
KINDS = ["scores", "last", "mean", "cls"]
NOTHING = SamplingParams(max_tokens=0)
PROMPT = "a prompt that takes more chunks than one, because it is longer than a step may be: " * 2


def params_of(kind: str) -> SamplingParams:
    return GREEDY if kind == "scores" else NOTHING


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_prefix_changes_nothing(layout: str, kind: str) -> None:
    engine, backend, collector = make_engine(layout)
    engine.start()
    first = make_request(PROMPT)
    engine.submit(first)
    collector.wait_end(first)
    before = backend.computed_tokens
    again = make_request(PROMPT, params_of(kind), reading=make_reading(kind))
    engine.submit(again)
    collector.wait_end(again)
    computed = backend.computed_tokens - before
    engine.stop(LIMIT_S)
    assert collector.reads[again.id] == read_alone(again.prompt, kind)
    assert collector.tokens.get((again.id, 0), []) == reference(again)
    # The last token's state is all that is wanted, so only there the cache is of use.
    assert (computed < len(again.prompt)) == (kind == "last")
    assert (again.hit.tokens > 0) == (kind == "last")
    assert_nothing_left(engine)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_kinds_at_once_are_read_as_alone_and_their_kv_is_shared_afterwards(layout: str) -> None:
    engine, backend, collector = make_engine(layout)
    requests = []
    for number in range(8):
        kind = KINDS[number % 4]
        prompt = PROMPT[: 20 + 17 * number] + str(number)
        requests.append((make_request(prompt, params_of(kind), reading=make_reading(kind)), kind))
        requests.append((make_request(prompt[::-1]), None))
    engine.start()
    for request, _ in requests:
        engine.submit(request)
    for request, kind in requests:
        assert collector.wait_end(request).reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert collector.tokens.get((request.id, 0), []) == reference(request)
        assert collector.reads.get(request.id) == (None if kind is None else read_alone(request.prompt, kind))
    before = backend.computed_tokens
    scored = requests[0][0]
    again = make_request(scored.prompt, NOTHING)
    engine.submit(again)
    collector.wait_end(again)
    engine.stop(LIMIT_S)
    assert backend.computed_tokens - before < len(scored.prompt)
    assert_nothing_left(engine)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_answers_have_their_prompt_scored_once(layout: str) -> None:
    engine, _, collector = make_engine(layout)
    engine.start()
    params = replace(GREEDY, n=3, temperature=1.0, seed=7)
    request = make_request(PROMPT, params, reading=PromptScoring(2))
    engine.submit(request)
    for index in range(3):
        collector.wait_end(request, index)
        assert collector.tokens[request.id, index] == reference(request, index)
    engine.stop(LIMIT_S)
    assert collector.reads[request.id] == read_alone(request.prompt, "scores")
    assert_nothing_left(engine)


@pytest.mark.parametrize("prompt", ["x", "xy"])
@pytest.mark.parametrize(("kind", "max_tokens"), [("scores", 1), *((kind, 0) for kind in KINDS)])
def test_the_shortest_prompts(prompt: str, kind: str, max_tokens: int) -> None:
    engine, _, collector = make_engine()
    engine.start()
    request = make_request(prompt, SamplingParams(max_tokens=max_tokens, temperature=0), reading=make_reading(kind))
    engine.submit(request)
    assert collector.wait_end(request).reason is FinishReason.LENGTH
    engine.stop(LIMIT_S)
    assert collector.reads[request.id] == read_alone(request.prompt, kind)
    assert len(collector.tokens.get((request.id, 0), [])) == max_tokens
    assert_nothing_left(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_preempted_while_its_prompt_is_read_reads_on(kind: str) -> None:
    """There is room for one of the two as it grows."""
    engine, _, collector = make_engine(tokens=192, running=4)
    grows = make_request("p" * 60, replace(GREEDY, max_tokens=100, ignore_eos=True), priority=-1)
    read = make_request(PROMPT[:110], params_of(kind), reading=make_reading(kind), priority=1)
    engine._accepting = True
    engine.submit(grows)
    engine.submit(read)
    for number in range(400):
        engine.turn()
        if number == 2 and read.sequences[0].running:
            engine.scheduler.requests.preempt(read.sequences[0])
        if not engine.scheduler.requests.has_work:
            break
    assert read.preemptions > 0
    assert collector.reads[read.id] == read_alone(read.prompt, kind)
    assert collector.tokens.get((read.id, 0), []) == reference(read)
    assert_nothing_left(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_cancelled_and_late_ones_end_once(kind: str) -> None:
    engine, _, collector = make_engine(latency_s=0.01)
    engine.start()
    gone = make_request(PROMPT, params_of(kind), reading=make_reading(kind))
    engine.submit(gone)
    engine.cancel(gone.id)
    assert collector.wait_end(gone).reason is FinishReason.CANCELLED
    late = make_request(PROMPT, params_of(kind), reading=make_reading(kind), arrival=engine._clock(), timeout_s=0.015)
    engine.submit(late)
    assert collector.wait_end(late).reason is FinishReason.TIMEOUT
    engine.stop(LIMIT_S)
    assert not collector.reads
    assert_nothing_left(engine)


def test_numbers_that_are_none_are_one_requests_error() -> None:
    engine, backend, collector = make_engine()
    real = backend.collect

    def broken(chunks: list[Chunk]) -> object:
        result = real(chunks)
        for read in result.read.values():
            (read.logprobs if isinstance(read, PromptScores) else read).fill(np.nan)
        return result

    backend.collect = broken  # type: ignore[method-assign,assignment]
    engine.start()
    requests = [make_request(PROMPT, params_of(kind), reading=make_reading(kind)) for kind in KINDS]
    plain = make_request("as if nothing were")
    for request in [*requests, plain]:
        engine.submit(request)
    for request in requests:
        end = collector.wait_end(request)
        assert end.reason is FinishReason.ERROR and "usable" in str(end.error)
    collector.wait_end(plain)
    engine.stop(LIMIT_S)
    assert collector.tokens[plain.id, 0] == reference(plain)
    assert_nothing_left(engine)


def test_scores_are_taken_again_from_where_memory_begins() -> None:
    scoring = PromptScoring(1)
    tokens = array("i", range(10))
    rows = np.arange(120.0, dtype=np.float32).reshape(10, 12) % 7

    def read(start: int, end: int) -> PromptScores:
        asked = scoring.ask(tokens, start, end)
        assert asked is not None
        return score_rows(rows[start : start + len(asked.targets)], asked.targets, asked.top)

    scoring.take(0, read(0, 4))
    scoring.take(4, read(4, 8))
    assert scoring.reusable == 8
    scoring.take(2, read(2, 10))
    assert scoring.reusable == 9 and len(scoring.result().logprobs) == 9
    whole = score_rows(rows[:9], tokens[1:], 1)
    for found, expected in zip(scoring.result(), whole, strict=True):
        assert np.array_equal(found, expected)


def test_scores_of_rows() -> None:
    rows = np.array([[1.0, 3.0, 3.0, -np.inf], [0.0, 0.0, 0.0, 0.0], [np.nan, 1.0, 1.0, 1.0]], np.float32)
    scores = score_rows(rows[:2], [0, 3], 3)
    total = np.log(np.exp(1.0) + 2 * np.exp(3.0))
    assert scores.logprobs == pytest.approx([1.0 - total, -np.log(4.0)])
    assert scores.ranks.tolist() == [3, 1]
    assert scores.top_ids.tolist() == [[1, 2, 0], [0, 1, 2]]
    assert scores.top_logprobs[0] == pytest.approx([3.0 - total, 3.0 - total, 1.0 - total])
    assert score_rows(rows[:1], [0], 4).top_ids.tolist() == [[1, 2, 0, -1]]
    with pytest.raises(BackendError, match="usable"):
        PromptScoring(0).take(0, score_rows(rows[2:], [1], 0))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_state_goes_back_over_after_a_lost_step_counts_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, kv = state_slots(slot_tokens=256)
    budget = StepBudget(inter_token_s=0.1, max_gap_s=0.25, prompt_only_s=0.5, max_tokens=32)
    scheduler = Scheduler(kv, budget, max_running=4)
    stepper, steps, collect = Stepper(backend, scheduler, timer=lambda: 0.0), 0, backend.collect

    def lose_some(chunks: list[Chunk]) -> object:
        nonlocal steps
        steps += 1
        result = collect(chunks)
        if steps in (4, 6):
            raise StepAbortedError("lost, though all was written")
        return result

    monkeypatch.setattr(backend, "collect", lose_some)
    prompt = [*map(ord, PROMPT)]
    prompt[39::40] = [END_TOKEN] * len(prompt[39::40])
    request = make_request(prompt, params_of(kind), reading=make_reading(kind))
    scheduler.requests.add(request)
    while scheduler.requests.has_work:
        stepper.advance()
        kv.check()
        assert steps < 60
    reads = [output.read for output in scheduler.requests.take_outputs() if output.read is not None]
    (read,) = map(as_lists, reads)
    assert steps > 6 and read == read_alone(request.prompt, kind)


def test_vectors_have_length_one() -> None:
    assert normalised(np.array([3.0, 4.0])).tolist() == [np.float32(0.6), np.float32(0.8)]
    assert normalised(np.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(BackendError, match="usable"):
        PromptPooling("last").take(0, np.array([np.inf, 0.0]))


def test_a_window_forgets_what_is_to_be_scored() -> None:
    with pytest.raises(InvalidRequestError, match="rolling window") as refused:
        SamplingParams(prompt_logprobs=1, context_window=ContextWindow(64))
    assert refused.value.param == "prompt_logprobs"
