"""How many tokens are drafted: what came true, and what rows take, decide."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from statistics import fmean

import pytest

from cllm.config import load_config
from cllm.drafts.acceptance import BUCKETS, Acceptance, MatchKind
from cllm.drafts.drafter import LONGEST_REST, LOOKUPS, Drafter
from cllm.drafts.follower import Follower
from cllm.drafts.step_shape import EXPECTED_ROW, MOST_ROWS, StepShape
from cllm.engine.params import SamplingParams
from cllm.offline import LLM
from draft_kit import new_sequence

Cost = Callable[[int], float]


def cheap(rows: int) -> float:
    """As a large model, whose steps wait for the memory."""
    return 0.05 * (1 + 0.02 * (rows - 1))


def dear(rows: int) -> float:
    """As a model whose rows each take their time."""
    return 0.005 * rows


def between(rows: int) -> float:
    return 0.004 * (1 + 0.25 * (rows - 1))


def lengths(drafter: Drafter, cost: Cost, prompt: list[int], truth: Iterable[int], others: int = 0) -> list[int]:
    """How long the drafts of each step were, for a sequence that goes on as the truth is."""
    sequence, rest = new_sequence(prompt), list(truth)
    sequence.append(rest.pop(0))
    found: list[int] = []
    while rest:
        allowed = drafter.begin_step(1 + others, False)
        draft = list(drafter.propose(sequence, min(allowed, len(rest)))) if allowed else []
        right = next((at for at, (one, other) in enumerate(zip(draft, rest, strict=False)) if one != other), len(draft))
        for token in rest[: right + 1]:
            sequence.append(token)
        del rest[: right + 1]
        drafter.observe_step(1 + others, len(draft), cost(1 + others + len(draft)), 0)
        found.append(len(draft))
    return found


TEXT = [random.Random(1).randrange(1000) for _ in range(400)]


def test_perfect_drafts_with_cheap_rows_become_long() -> None:
    found = lengths(Drafter(recent_tokens=0), cheap, TEXT, TEXT)
    assert fmean(found[-8:]) > 14 and len(found) < len(TEXT) / 6


def test_perfect_drafts_with_rows_that_take_their_time_are_made_as_long_as_pays() -> None:
    found = lengths(Drafter(recent_tokens=0), between, TEXT, TEXT)
    seconds = sum(between(1 + count) for count in found)
    assert seconds < len(TEXT) * between(1) / 2.2


def test_nothing_is_drafted_where_rows_cost_what_they_bring() -> None:
    drafter = Drafter(recent_tokens=0)
    found = lengths(drafter, dear, TEXT, TEXT)
    assert sum(found) < 40 and not any(found[40:])
    assert drafter.begin_step(1, False) == 0


def repeating_badly(count: int) -> list[int]:
    """Three tokens that were there before, and then always another one."""
    draw = random.Random(2)
    return [token for number in range(count) for token in (1, 2, 3, 100 + number, 5000 + draw.randrange(9000))]


@pytest.mark.parametrize("cost", [between, dear])
def test_useless_drafts_are_given_up(cost: Cost) -> None:
    found = lengths(Drafter(recent_tokens=0), cost, repeating_badly(4), repeating_badly(200))
    assert sum(map(bool, found[-300:])) <= 3


def test_drafts_are_made_again_when_they_come_true_again() -> None:
    drafter = Drafter(recent_tokens=0)
    found = lengths(drafter, between, TEXT, [*repeating_badly(100), *TEXT])
    assert not any(found[400:480]) and fmean(found[-20:]) > 2


def test_a_sequence_without_drafts_is_looked_at_less_and_less_often() -> None:
    drafter = Drafter(recent_tokens=0)
    sequence = new_sequence([1, 2])
    drafter.observe_step(1, 0, between(1), 0)
    looked = []
    for token in range(200):
        sequence.append(1000 + token)
        drafter.begin_step(1, False)
        assert not drafter.propose(sequence, 8)
        assert isinstance(sequence.drafts, Follower)
        looked.append(sequence.drafts.grams.missing(sequence.tokens) == 0)
    assert all(looked[:LOOKUPS]) and sum(looked[100:]) == 100 // (1 + LONGEST_REST)


def test_many_answers_leave_no_room_for_drafts_where_rows_take_their_time() -> None:
    drafter = Drafter()
    for rows in (1, 2, 4, 8, 16, 32) * 4:
        drafter.observe_step(rows, 0, between(rows), 0)
    assert drafter.begin_step(1, False) > 0
    assert drafter.begin_step(32, False) == 0


def test_no_drafts_while_prompts_wait_nor_for_too_many_rows() -> None:
    drafter = Drafter(max_step_tokens=24)
    assert drafter.begin_step(4, False) == 0  # it is not known yet what a step without drafts takes
    drafter.observe_step(4, 0, between(4), 0)
    assert drafter.begin_step(4, False) == 8  # three times as many rows as were measured
    drafter.observe_step(4, 8, between(12), 0)
    assert drafter.begin_step(4, False) == 24
    assert drafter.begin_step(4, True) == 0
    assert drafter.begin_step(MOST_ROWS, False) == 0


def test_steps_with_prompts_say_nothing_about_rows() -> None:
    drafter = Drafter()
    drafter.observe_step(8, 0, 0.01, 0)
    before = drafter.begin_step(8, False)
    for _ in range(100):
        drafter.observe_step(8, 0, 0.01, 0)
        drafter.observe_step(8, 16, 9.0, 512)
    assert drafter.begin_step(8, False) == before


def test_what_rows_cost_is_learnt_and_a_slower_machine_changes_no_shape() -> None:
    shape = StepShape()
    draw = random.Random(3)
    for number in range(2000):
        rows = draw.choice((1, 1, 2, 4, 8, 16))
        shape.observe(rows, between(rows) * (3.0 if number >= 1000 else 1.0) * draw.uniform(0.9, 1.1))
    for rows in (2, 3, 4, 6, 8, 12, 16, 24):
        assert shape.of(rows) / shape.of(1) == pytest.approx(between(rows) / between(1), rel=0.15)


def test_one_slow_step_is_forgotten() -> None:
    shape = StepShape()
    shape.observe(1, 0.01)
    shape.observe(5, 1.0)
    assert shape.of(5) > 50
    for _ in range(3000):
        shape.observe(1, 0.01)
    assert shape.of(5) == pytest.approx(1 + 4 * EXPECTED_ROW, rel=0.05)


def test_a_sequence_begins_with_what_is_known_of_its_space() -> None:
    space = Acceptance()
    for _ in range(200):
        space.observe(MatchKind.OWN, 40, 3, failed=False)
        space.observe(MatchKind.NEAR, 1, 0, failed=True)
    sequence = Acceptance(space)
    assert sequence.rate(MatchKind.OWN, BUCKETS - 1) > 0.95 and sequence.rate(MatchKind.NEAR, 1) < 0.1
    for _ in range(20):
        sequence.observe(MatchKind.OWN, 40, 0, failed=True)
    assert sequence.rate(MatchKind.OWN, BUCKETS - 1) < 0.3
    assert Acceptance(space).rate(MatchKind.OWN, BUCKETS - 1) > 0.8


def test_the_chances_of_a_draft_grow_with_the_match() -> None:
    assert Acceptance().rates(MatchKind.OWN, 3, 6) == [0.4, 0.55, 0.55, 0.55, 0.55, 0.7]
    assert Acceptance().rates(MatchKind.OWN, 40, 3) == [0.9] * 3


def test_settings() -> None:
    drafts = load_config(None, {}, {}).config.drafts
    assert drafts.enabled and drafts.max_tokens <= drafts.max_step_tokens
    assert not load_config(None, {"drafts.enabled": False}, {}).config.drafts.enabled


@pytest.mark.parametrize("enabled", [True, False])
def test_an_engine_counts_what_it_drafted(enabled: bool) -> None:
    settings = {"drafts.enabled": enabled, "backend.fake.latency_ms": 1.0}
    with LLM("fake", backend="fake", settings=settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        texts = [llm.generate("say it again", params)[0].token_ids for _ in range(3)]
        counts = llm.kv()
    assert texts[0] == texts[1] == texts[2]
    assert (counts["drafted_tokens"] > 0) == (counts["accepted_drafts"] > 0) == enabled
    assert counts["accepted_drafts"] <= counts["drafted_tokens"]
