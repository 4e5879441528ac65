"""Answers by a grammar: valid, and the same alone or among others, preempted, computed ahead, drafted or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.backends.fake import END_TOKEN, FakeBackend
from cllm.engine.draw import Constraint, Mask
from cllm.engine.params import SamplingParams
from cllm.engine.plan import Drafting
from cllm.engine.request import FinishReason, Output, Request
from cllm.engine.stepper import Stepper
from cllm.structured.structure import Structure
from draft_kit import ScriptedDrafter
from engine_kit import make_request, make_scheduler, reference
from pipelined_backend import PipelinedFake
from structured_kit import SCHEMAS, alone, by_schema, check_valid, constrained, grammar, text_of
from thorough import sampled

RECORD = by_schema(
    {
        "type": "object",
        "properties": {
            "the_name_of_the_first_person": {"type": "string", "maxLength": 5},
            "number_of_people_in_the_house": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["the_name_of_the_first_person", "number_of_people_in_the_house"],
        "additionalProperties": False,
    }
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=300)
LAYOUTS = ["paged", "slots", "ahead"]


def run(layout: str, *requests: Request, drafter: Any = None, tokens: int = 8192, running: int = 8) -> list[Output]:
    backend = PipelinedFake() if layout == "ahead" else FakeBackend(context_length=1024)
    drafting = None if drafter is None else Drafting(drafter, 64)
    scheduler = make_scheduler(
        backend, "slots" if layout == "slots" else "paged", tokens=tokens, running=running, drafting=drafting
    )
    now = 0.0

    def timer() -> float:
        nonlocal now
        now += 1e-4
        return now

    stepper = Stepper(backend, scheduler, timer=timer)
    outputs: list[Output] = []
    for request in requests:
        scheduler.requests.add(request)
    while scheduler.requests.has_work or stepper.under_way:
        assert stepper.advance()
        scheduler.kv.check()
        outputs += scheduler.requests.take_outputs()
    assert scheduler.kv.usage().referenced == 0
    return outputs


def tokens_of(outputs: Sequence[Output], request: Request, index: int = 0) -> list[int]:
    return [o.token_id for o in outputs if (o.request_id, o.answer) == (request.id, index) and o.token_id is not None]


def end_of(outputs: Sequence[Output], request: Request, index: int = 0) -> Output:
    (end,) = [o for o in outputs if (o.request_id, o.answer) == (request.id, index) and o.reason is not None]
    return end


@settings(max_examples=sampled(60), deadline=None)
@given(
    schema=SCHEMAS,
    layout=st.sampled_from(["paged", "ahead"]),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
    logprobs=st.sampled_from([None, None, 2]),
    penalty=st.sampled_from([1.0, 1.3]),
    n=st.sampled_from([1, 2]),
    drafts=st.booleans(),
    tokens=st.sampled_from([8192, 520]),
)
def test_answers_are_valid_and_the_same_whatever_happens(
    schema: Any, layout: str, temperature: float, seed: int, logprobs: int | None, penalty: float, n: int,
    drafts: bool, tokens: int,
) -> None:  # fmt: skip
    structure = by_schema(schema)
    params = SamplingParams(
        temperature=temperature, seed=seed, logprobs=logprobs, repetition_penalty=penalty, n=n, max_tokens=400
    )
    requests = [constrained(f"prompt {number}", structure, params) for number in range(3)]
    free = make_request("free", replace(params, n=1, max_tokens=12, ignore_eos=True), max_context=1024)
    truths = {(r.id, index): alone(r, structure, index) for r in requests for index in range(n)}
    drafter = None
    if drafts and layout != "ahead":

        def expected(request: Request, index: int) -> Sequence[int]:
            return truths.get((request.id, index)) or reference(request, index)

        drafter = ScriptedDrafter(expected, ("right", "half", "wrong"), seed=seed, longest=6)
    outputs = run(layout, *requests, free, drafter=drafter, tokens=tokens)
    assert tokens_of(outputs, free) == reference(free)
    for request in requests:
        for index in range(n):
            answer, end = tokens_of(outputs, request, index), end_of(outputs, request, index)
            assert answer == truths[request.id, index]
            if end.reason is FinishReason.STOP:
                assert answer[-1] == END_TOKEN
                check_valid(schema, answer[:-1])
            else:
                assert (end.reason, len(answer)) == (FinishReason.LENGTH, 400)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forced_tokens_are_computed_as_one_chunk(layout: str) -> None:
    request = constrained("who?", RECORD, replace(GREEDY, max_tokens=120))
    backend = PipelinedFake() if layout == "ahead" else FakeBackend()
    scheduler = make_scheduler(backend, "slots" if layout == "slots" else "paged")
    stepper = Stepper(backend, scheduler, timer=lambda: 0.0)
    scheduler.requests.add(request)
    while scheduler.requests.has_work or stepper.under_way:
        stepper.advance()
    answer = tokens_of(scheduler.requests.take_outputs(), request)
    assert answer == alone(request, RECORD) and len(answer) > 70
    assert stepper.steps <= 14  # a name of 5, a number of 2, and what stands between them


def test_a_mask_goes_before_min_tokens_and_ignore_eos() -> None:
    choice = Structure("choice", '["yes", "no"]')
    request = constrained("?", choice, replace(GREEDY, min_tokens=50, ignore_eos=True))
    outputs = run("paged", request)
    assert text_of(tokens_of(outputs, request)) in ("yes", "no")
    assert end_of(outputs, request).reason is FinishReason.STOP


def test_max_tokens_cuts_forced_tokens_off() -> None:
    request = constrained("?", RECORD, replace(GREEDY, max_tokens=9))
    outputs = run("paged", request)
    assert text_of(tokens_of(outputs, request)) == '{"the_nam'
    assert end_of(outputs, request).reason is FinishReason.LENGTH


@pytest.mark.parametrize("layout", ["paged", "ahead"])
def test_log_probabilities_change_no_answer(layout: str) -> None:
    plain = constrained("who?", RECORD, replace(GREEDY, max_tokens=120))
    told = constrained("who?", RECORD, replace(GREEDY, max_tokens=120, logprobs=1))
    outputs = run(layout, plain, told)
    assert tokens_of(outputs, plain) == tokens_of(outputs, told)
    assert all(o.logprob is not None and o.logprob.token_id == o.token_id for o in outputs if o.request_id == told.id)


class Failing:
    """A constraint whose n-th call fails."""

    def __init__(self, inner: Constraint, calls: list[int]) -> None:
        self.inner = inner
        self._calls = calls

    def _count(self) -> None:
        self._calls[0] -= 1
        if self._calls[0] == 0:
            raise ArithmeticError("no way on")

    @property
    def masks(self) -> Failing:
        return self

    def fill(self, constraints: Sequence[Constraint]) -> list[Mask | Exception]:
        self._count()
        inner = [each.inner if isinstance(each, Failing) else each for each in constraints]
        return inner[0].masks.fill(inner)

    @property
    def forced(self) -> Sequence[int]:
        return self.inner.forced

    def accept(self, token: int) -> None:
        self._count()
        self.inner.accept(token)

    def agreed(self, tokens: Sequence[int]) -> int:
        self._count()
        return self.inner.agreed(tokens)

    def twin(self) -> Failing:
        return Failing(self.inner.twin(), self._calls)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("quiet")
def test_a_constraint_that_fails_is_its_own_answer_s_error(layout: str) -> None:
    for number in range(1, 200):
        calls = [number]
        bad = make_request("who?", replace(GREEDY, max_tokens=90), constraint=Failing(grammar(RECORD).start(), calls))
        free = make_request("free", SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        outputs = run(layout, bad, free)
        assert tokens_of(outputs, free) == reference(free)
        end = end_of(outputs, bad)
        if calls[0] > 0:
            assert end.reason in (FinishReason.STOP, FinishReason.LENGTH) and number > 20
            return
        assert end.reason is FinishReason.ERROR and "no way on" in str(end.error)
    raise AssertionError("it never got through")


def test_answers_that_cannot_be_computed_ahead_share_their_steps() -> None:
    """However they came: two groups that take turns would need twice as many steps."""
    backend = PipelinedFake()
    scheduler = make_scheduler(backend, "paged")
    stepper = Stepper(backend, scheduler, timer=lambda: 0.0)
    sizes: list[int] = []
    submit = backend.submit
    backend.submit = lambda chunks: (sizes.append(len(chunks)), submit(chunks))[1]  # type: ignore[method-assign]
    free_text = by_schema({"type": "string", "minLength": 30, "maxLength": 30})
    requests = [make_request(f"who {n}?", GREEDY, constraint=grammar(free_text).start()) for n in range(4)]
    for request in requests:
        scheduler.requests.add(request)
        stepper.advance()
    del sizes[:]
    while all(request.unfinished for request in requests):
        stepper.advance()
    assert sizes.count(4) > 20 and sizes.count(4) >= 0.9 * len(sizes)
    free = make_request("on and on", replace(GREEDY, max_tokens=40, ignore_eos=True))
    others = [make_request(f"more {n}", replace(GREEDY, max_tokens=40, ignore_eos=True)) for n in range(3)]
    for request in (free, *others, make_request("who?", GREEDY, constraint=grammar(free_text).start())):
        scheduler.requests.add(request)
    ahead = 0
    while free.unfinished:
        stepper.advance()
        ahead += backend.under_way
    assert ahead > 30, "one answer with a schema does not hold up four without"
