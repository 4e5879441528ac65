"""The step budget on a machine whose costs are known exactly."""

from __future__ import annotations

import pytest

from cllm.engine.budget import REMEASURE_ROWS_EVERY, SMALLEST_CHUNK, StepBudget

ROW_S, TOKEN_S = 0.010, 0.004


def make(max_tokens: int = 512) -> StepBudget:
    return StepBudget(inter_token_s=0.1, max_gap_s=0.25, prompt_only_s=1.0, max_tokens=max_tokens)


def cost(prompt_tokens: int, rows: int, scale: float = 1.0) -> float:
    return scale * (rows * ROW_S + (ROW_S + prompt_tokens * TOKEN_S if prompt_tokens else 0.0))


def run(budget: StepBudget, *, rows: int, prompts: int, steps: int, scale: float = 1.0) -> list[tuple[int, float]]:
    """Steps with endless prompts: (prompt tokens, seconds) of each."""
    taken = []
    for _ in range(steps):
        tokens = budget.prompt_tokens(rows, prompts, 10_000)
        seconds = cost(tokens, rows, scale)
        budget.observe(tokens, rows, seconds)
        taken.append((tokens, seconds))
    return taken


def test_without_answers_chunks_fill_the_prompt_target() -> None:
    steps = run(make(), rows=0, prompts=1, steps=20)
    assert steps[0][0] == 64
    assert 0.9 < steps[-1][1] <= 1.0


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_beside_answers_no_step_exceeds_the_longest_gap_and_the_mean_keeps_the_target(rows: int) -> None:
    budget = make()
    run(budget, rows=rows, prompts=0, steps=3)
    run(budget, rows=0, prompts=1, steps=10)
    steps = run(budget, rows=rows, prompts=1, steps=200)[20:]
    assert max(seconds for _, seconds in steps) <= max(0.25, 6 * rows * ROW_S) * 1.02
    mean = sum(seconds for _, seconds in steps) / len(steps)
    assert mean <= max(0.1, 3 * rows * ROW_S) * 1.1 + ROW_S
    assert sum(tokens for tokens, _ in steps) > 0


def test_where_many_wait_for_their_first_token_chunks_are_longer() -> None:
    few, many = make(), make()
    for budget in (few, many):
        run(budget, rows=2, prompts=0, steps=3)
        run(budget, rows=0, prompts=1, steps=10)
    assert sum(t for t, _ in run(many, rows=2, prompts=6, steps=50)) > sum(
        t for t, _ in run(few, rows=2, prompts=1, steps=50)
    )


def test_it_follows_a_machine_that_becomes_slower() -> None:
    budget = make()
    run(budget, rows=3, prompts=0, steps=3)
    run(budget, rows=0, prompts=1, steps=10)
    run(budget, rows=3, prompts=1, steps=50)
    slow = run(budget, rows=3, prompts=1, steps=300, scale=2.0)
    assert max(seconds for _, seconds in slow[100:]) <= 6 * 3 * 2 * ROW_S * 1.02


def test_prompts_advance_even_where_answers_alone_take_too_long() -> None:
    slow = StepBudget(inter_token_s=0.1, max_gap_s=0.25, prompt_only_s=0.01, max_tokens=512)
    steps = run(slow, rows=100, prompts=1, steps=100)
    assert {tokens for tokens, _ in steps[10:]} == {0, SMALLEST_CHUNK}


def test_a_short_prompt_goes_at_once() -> None:
    budget = make()
    run(budget, rows=0, prompts=1, steps=5)
    run(budget, rows=3, prompts=0, steps=5)
    assert budget.prompt_tokens(3, 1, 5) == 5


def test_rows_are_measured_again_from_time_to_time() -> None:
    budget = make()
    run(budget, rows=1, prompts=0, steps=1)
    steps = run(budget, rows=1, prompts=4, steps=REMEASURE_ROWS_EVERY * 4)
    assert any(tokens == 0 for tokens, _ in steps)


def test_chunks_never_exceed_the_step_limit() -> None:
    budget = make(max_tokens=24)
    assert max(tokens for tokens, _ in run(budget, rows=0, prompts=1, steps=20)) == 24


def test_prompts_use_the_whole_allowance() -> None:
    """The mean comes near the target: what one step leaves unspent is not lost."""
    budget = make()
    run(budget, rows=3, prompts=0, steps=3)
    run(budget, rows=0, prompts=1, steps=10)
    steps = run(budget, rows=3, prompts=1, steps=400)[50:]
    assert 0.09 < sum(seconds for _, seconds in steps) / len(steps) <= 0.102


# -- a backend whose rows are far cheaper together, and to which small chunks cost no more than large ones ----------


def batching_cost(prompt_tokens: int, rows: int) -> float:
    return 0.0032 + rows * 0.00085 + prompt_tokens * 0.0012


def run_long_prompt(budget: StepBudget, rows: int, prompt: int = 2600) -> list[tuple[int, float]]:
    """Streams come one after another with short prompts, run for a while, then a long prompt arrives."""

    def step(running: int, wanted: int) -> tuple[int, float]:
        tokens = budget.prompt_tokens(running, 1, wanted) if wanted else 0
        seconds = batching_cost(tokens, running)
        budget.observe(tokens, running, seconds)
        return tokens, seconds

    def compute(running: int, wanted: int) -> list[tuple[int, float]]:
        steps = []
        while wanted:
            steps.append(step(running, wanted))
            wanted -= steps[-1][0]
        return steps

    for running in range(rows):
        compute(running, 32)
    for _ in range(10):
        step(rows, 0)
    return compute(rows, prompt)


@pytest.mark.parametrize(
    ("rows", "longest", "total"), [(1, 0.102, 3.4), (3, 0.102, 3.4), (16, 0.11, 3.9), (32, 0.2, 4.8)]
)
def test_a_long_prompt_beside_rows_that_are_cheaper_together(rows: int, longest: float, total: float) -> None:
    """The prompt alone would take 3.1 s."""
    budget = StepBudget(inter_token_s=0.1, max_gap_s=0.1, prompt_only_s=1.0, max_tokens=512)
    steps = run_long_prompt(budget, rows)
    assert max(seconds for _, seconds in steps) <= longest
    assert sum(seconds for _, seconds in steps) <= total


def test_another_number_of_rows_is_measured_before_prompts_go_on() -> None:
    budget = make()
    run(budget, rows=1, prompts=0, steps=3)
    run(budget, rows=0, prompts=1, steps=5)
    taken = [tokens for tokens, _ in run(budget, rows=8, prompts=1, steps=6)]
    assert taken[0] == 0 and any(taken)


def test_many_rows_wait_only_while_they_are_slow() -> None:
    budget = StepBudget(inter_token_s=0.1, max_gap_s=0.1, prompt_only_s=1.0, max_tokens=512)
    assert budget.rows_at_once(128) == 128
    budget.observe(0, 128, 0.4)
    assert budget.rows_at_once(128) == 32
    assert budget.rows_at_once(33) == 33
    for _ in range(20):
        rows = budget.rows_at_once(128)
        budget.observe(0, rows, rows * 0.0005)
    assert budget.rows_at_once(128) == 128


def test_where_small_chunks_cost_more_all_rows_are_computed_together() -> None:
    budget = make()
    budget.observe(0, 128, 4.0)
    assert budget.rows_at_once(128) == 128


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_a_crowd_of_prompts_does_not_make_steps_longer_than_half_as_much_again(rows: int) -> None:
    budget = StepBudget(inter_token_s=0.1, max_gap_s=0.1, prompt_only_s=1.0, max_tokens=512)
    steps = run(budget, rows=rows, prompts=128, steps=60)
    assert any(tokens for tokens, _ in steps)
    assert all(seconds <= max(0.16, 2.6 * rows * ROW_S) for _, seconds in steps[10:])
