"""Drafts within `scheduler.max_gap_ms`: what they add to a step is learnt apart from what answers take."""

from __future__ import annotations

from typing import Any

from cllm.backends.base import StepResult
from cllm.backends.fake import FakeBackend
from cllm.engine.plan import Drafting, StepPlan
from cllm.engine.stepper import Stepper
from draft_kit import LONG, oracle
from engine_kit import make_request, make_scheduler


def test_a_step_with_drafts_keeps_the_promise() -> None:
    """Sixteen answers take 200 ms, and a drafted token 8 ms: of the 250 ms there is room for three at most."""
    drafter = oracle(longest=4)
    backend = FakeBackend()
    now = [0.0]
    compute = backend.collect
    scheduler = make_scheduler(
        backend, running=16, drafting=Drafting(drafter, backend.traits.most_drafts), clock=lambda: now[0]
    )
    taken: list[tuple[int, int, float]] = []

    def timed(ticket: Any) -> StepResult:
        rows, drafted, prompts = plan.decode_rows, plan.drafted, plan.prompt_tokens
        seconds = 0.0125 * rows + 0.008 * drafted + 0.004 * prompts
        now[0] += seconds
        if not prompts:
            taken.append((rows, drafted, seconds))
        return compute(ticket)

    backend.collect = timed  # type: ignore[method-assign]
    stepper = Stepper(backend, scheduler, timer=lambda: now[0])
    schedule = scheduler.schedule

    def noted() -> StepPlan:
        nonlocal plan
        plan = schedule()
        return plan

    plan = StepPlan()
    scheduler.schedule = noted  # type: ignore[method-assign]
    for letter in "abcdefghijklmnop":
        scheduler.requests.add(make_request(letter, LONG))
    begin_step = drafter.begin_step
    drafter.begin_step = lambda rows, wait: begin_step(rows, wait) if len(taken) > 8 else 0  # type: ignore[method-assign]
    while scheduler.requests.has_work:
        stepper.advance()
    full = [step for step in taken if step[0] == 16]
    assert any(drafted for _, drafted, _ in full)
    assert max(seconds for _, _, seconds in full) <= 0.25


def test_drafts_are_no_answers_to_the_budget() -> None:
    budget = make_scheduler(FakeBackend()).budget
    budget.observe(0, 1, 0.1)
    for _ in range(50):
        budget.observe(0, 1, 0.3, drafted=8)
    assert not budget.costs.knows_rows(9) and budget.costs.rows_s(1) == 0.1
    assert 0.15 < budget.costs.drafts_s(8, 1) < 0.25
    assert budget.take_warning() is None
    for _ in range(50):
        budget.observe(0, 1, 0.4, drafted=8)
        budget.observe(0, 1, 0.3)
    told = budget.take_warning()
    assert told is not None and "one answer takes" in told
    assert "a smaller model or more cores" in told and "max_running" not in told


def test_drafts_that_seemed_to_take_too_long_are_tried_again() -> None:
    budget = make_scheduler(FakeBackend()).budget
    budget.observe(0, 1, 0.2)
    for _ in range(20):
        budget.observe(0, 1, 5.0, drafted=1)
    assert budget.most_drafts(1) == 0
    for _ in range(5000):
        budget.observe(0, 1, 0.2)
        if budget.most_drafts(1):
            return
    raise AssertionError("there are no drafts any more")
