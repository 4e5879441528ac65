"""The step budget on a machine whose costs are known exactly."""

from __future__ import annotations

import pytest

from budget_kit import Law, Server
from cllm.engine.budget import LEAST_SHARE, REMEASURE_ROWS_EVERY, SMALLEST_CHUNK, StepBudget

ROW_S = Law().row_s


def make(max_tokens: int = 512, chunk_gap_s: float = 0.0, prompt_only_s: float = 1.0) -> StepBudget:
    return StepBudget(
        inter_token_s=0.1, max_gap_s=0.25, prompt_only_s=prompt_only_s, max_tokens=max_tokens, chunk_gap_s=chunk_gap_s
    )


def warm(budget: StepBudget, rows: int, law: Law | None = None) -> Server:
    server = Server(budget, law or Law())
    server.run(rows=rows, prompts=0, steps=3)
    server.run(rows=0, prompts=1, steps=10)
    return server


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_without_answers_chunks_fill_the_prompt_target() -> None:
    steps = Server(make()).run(rows=0, prompts=1, steps=20)
    assert steps[0].tokens == 64
    assert 0.9 < steps[-1].seconds <= 1.0


@pytest.mark.parametrize("rows", [1, 3, 8, 12])
@pytest.mark.parametrize("prompts", [1, 100])
@pytest.mark.parametrize("chunk_gap_s", [0.0, 0.25])
def test_beside_answers_no_step_is_longer_than_the_longest_gap(rows: int, prompts: int, chunk_gap_s: float) -> None:
    steps = warm(make(chunk_gap_s=chunk_gap_s), rows).run(rows=rows, prompts=prompts, steps=200)
    assert max(step.seconds for step in steps) <= 0.25
    assert sum(step.tokens for step in steps) > 0


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("chunk_gap_s", [0.0, 0.25])
def test_beside_few_prompts_the_mean_keeps_the_target(rows: int, chunk_gap_s: float) -> None:
    steps = warm(make(chunk_gap_s=chunk_gap_s), rows).run(rows=rows, prompts=1, steps=400)[50:]
    target_s = max(0.1, 3 * rows * ROW_S)
    assert 0.8 * target_s < mean([step.seconds for step in steps]) <= target_s * 1.1 + ROW_S


def test_where_small_chunks_cost_no_more_every_step_is_alike() -> None:
    steps = warm(make(), 3).run(rows=3, prompts=1, steps=100)
    with_prompts = [step.seconds for step in steps if step.tokens]
    assert max(with_prompts) <= 0.1
    assert min(with_prompts) >= 0.09


def test_where_small_chunks_cost_more_prompts_save_up_for_large_ones() -> None:
    steps = warm(make(chunk_gap_s=0.25), 3).run(rows=3, prompts=1, steps=100)[20:]
    assert min(step.tokens for step in steps if step.tokens) > 45
    assert sum(step.tokens == 0 for step in steps) > 30


def test_where_many_wait_for_their_first_token_steps_are_as_long_as_the_promise_permits() -> None:
    steps = warm(make(), 2).run(rows=2, prompts=6, steps=50)
    assert max(step.seconds for step in steps) > 0.21


def test_it_follows_a_machine_that_becomes_slower() -> None:
    server = warm(make(), 3)
    server.run(rows=3, prompts=8, steps=50)
    server.law = Law(row_s=2 * ROW_S, token_s=2 * Law().token_s)
    slow = server.run(rows=3, prompts=8, steps=300)
    assert max(step.seconds for step in slow[10:]) <= 0.25
    assert sum(step.seconds > 0.25 for step in slow) <= 4


def test_what_the_host_does_between_steps_is_part_of_the_gap() -> None:
    server = warm(make(), 3)
    for _ in range(100):
        server.budget.costs.observe_host(0.05)
    steps = server.run(rows=3, prompts=8, steps=50)
    assert 0.165 < max(step.seconds for step in steps) <= 0.201


@pytest.mark.parametrize("rows", [24, 100])
def test_prompts_advance_even_where_answers_alone_take_too_long(rows: int) -> None:
    steps = Server(make()).run(rows=rows, prompts=1, steps=100)
    assert {step.tokens > 0 for step in steps[10:]} == {False, True}
    assert max(step.seconds for step in steps[10:]) <= rows * ROW_S * (1 + LEAST_SHARE) * 1.01 + 4 * Law().token_s


def test_a_promise_that_cannot_be_kept_is_told_once() -> None:
    server = Server(make())
    server.run(rows=8, prompts=1, steps=100)
    assert server.budget.take_warning() is None
    server.run(rows=32, prompts=0, steps=100)
    told = server.budget.take_warning()
    assert told is not None and "scheduler.max_gap_ms is 250" in told and "32 answers at once take 320 ms" in told
    assert "of a prompt" not in told
    server.run(rows=64, prompts=0, steps=100)
    assert server.budget.take_warning() is None


def test_it_is_told_where_only_prompts_break_it() -> None:
    server = warm(make(), 24)
    server.run(rows=24, prompts=3, steps=60)
    told = server.budget.take_warning()
    assert told is not None and "24 answers at once take 240 ms" in told and "tokens of a prompt" in told


def test_a_short_prompt_goes_at_once() -> None:
    server = Server(make(chunk_gap_s=0.25))
    server.run(rows=0, prompts=1, steps=5)
    server.run(rows=3, prompts=0, steps=5)
    assert [step.tokens for step in server.compute(3, [5])] == [5]


def test_the_first_prompt_beside_answers_is_careful() -> None:
    """Answers whose prompts were all found in the cache: nothing is known of what a token costs."""
    server = Server(make(), Law(row_s=0.05, token_s=0.02))
    server.run(rows=1, prompts=0, steps=3)
    assert server.run(rows=1, prompts=3, steps=1)[0].seconds <= 0.25


def test_rows_are_measured_again_from_time_to_time() -> None:
    server = Server(make())
    server.run(rows=1, prompts=0, steps=1)
    steps = server.run(rows=1, prompts=4, steps=REMEASURE_ROWS_EVERY * 4)
    assert any(step.tokens == 0 for step in steps)


def test_chunks_never_exceed_the_step_limit() -> None:
    assert max(step.tokens for step in Server(make(max_tokens=24)).run(rows=0, prompts=1, steps=20)) == 24


def test_several_prompts_share_a_step_and_no_chunk_is_tiny() -> None:
    server = warm(make(), 2)
    server.prompts = [(0, 20), (0, 300), (0, 300)]
    budget = server.budget
    allowance = budget.allowance(2, 3, 10.0, True)
    assert allowance is not None
    taken = [allowance.take(wanted, 0) for wanted in (20, 300, 300)]
    assert taken[0] == 20 and taken[1] >= SMALLEST_CHUNK and taken[2] == 0


def test_far_into_a_long_prompt_chunks_are_smaller() -> None:
    """A token that looks back at 8,000 costs three times as much as one at the beginning."""
    server = warm(make(), 2, Law(pair_s=1e-6))
    steps = server.compute(2, [8000])
    assert max(step.seconds for step in steps) <= 0.11
    server.prompts = [(0, 500), (7000, 500)]
    both = [server.step(2, waiting=5) for _ in range(10)]
    assert max(step.seconds for step in both) <= 0.26


def test_an_answer_that_has_no_row_in_this_step_waits_for_it_all_the_same() -> None:
    server = warm(make(), 1)
    allowance = server.budget.allowance(0, 1, 100.0, True)
    assert allowance is not None and 15 < allowance.take(10_000, 0) < 25


# -- a backend whose rows are far cheaper together, and to which small chunks cost no more than large ones ----------

BATCHING = Law(step_s=0.0032, row_s=0.00085, token_s=0.0012)


@pytest.mark.parametrize(
    ("rows", "longest", "total"), [(1, 0.102, 3.4), (3, 0.102, 3.4), (16, 0.11, 3.9), (32, 0.11, 4.8)]
)
def test_a_long_prompt_beside_rows_that_are_cheaper_together(rows: int, longest: float, total: float) -> None:
    """Streams come one after another with short prompts, run for a while, then a long prompt arrives. Alone it would
    take 3.1 s."""
    server = Server(StepBudget(inter_token_s=0.1, max_gap_s=0.25, prompt_only_s=1.0, max_tokens=512), BATCHING)
    for running in range(rows):
        server.compute(running, [32])
    server.run(rows=rows, prompts=0, steps=10)
    steps = server.compute(rows, [2600])
    assert max(step.seconds for step in steps) <= longest
    assert sum(step.seconds for step in steps) <= total


def test_another_number_of_rows_is_measured_before_prompts_go_on() -> None:
    server = warm(make(), 1)
    taken = [step.tokens for step in server.run(rows=8, prompts=1, steps=6)]
    assert taken[0] == 0 and any(taken)


def test_many_answers_of_few_requests_wait_only_while_they_are_slow() -> None:
    budget = make()
    assert budget.rows_at_once(128, 1) == 128
    budget.observe(0, 128, 0.4)
    assert budget.rows_at_once(128, 1) == 32
    assert budget.rows_at_once(33, 1) == 33
    for _ in range(20):
        rows = budget.rows_at_once(128, 1)
        budget.observe(0, rows, rows * 0.0005)
    assert budget.rows_at_once(128, 1) == 128


def test_far_into_a_long_context_fewer_rows_are_computed_at_once() -> None:
    """Where a row costs as much in a small step as in a large one, small steps are as good, and others wait less."""
    budget = make()
    budget.observe(0, 3, 0.008 + 3 * 0.001)  # near the beginning
    took = []
    for _ in range(30):
        rows = budget.rows_at_once(128, 1)
        took.append(0.008 + rows * 0.0065)
        budget.observe(0, rows, took[-1])
    assert max(took) < 0.12 and max(took[4:]) < 0.1
    assert rows == budget.rows_at_once(20, 1) == 14 and budget.rows_at_once(8, 1) == 8


def test_where_fewer_rows_would_cost_almost_as_much_they_are_computed_together() -> None:
    budget = make()
    for _ in range(12):
        rows = budget.rows_at_once(128, 1)
        budget.observe(0, rows, 0.15 + rows * 0.001)
    assert budget.rows_at_once(128, 1) >= 32


def test_every_request_has_a_row_in_every_step() -> None:
    """Who is left out waits for two steps, and the promise is about a stream's gaps."""
    budget = make()
    budget.observe(0, 128, 1.6)
    assert budget.rows_at_once(128, 128) == 128
    assert budget.rows_at_once(128, 60) == 60


def test_where_small_chunks_cost_more_all_rows_are_computed_together() -> None:
    budget = make(chunk_gap_s=0.25)
    budget.observe(0, 128, 4.0)
    assert budget.rows_at_once(128, 1) == 128
