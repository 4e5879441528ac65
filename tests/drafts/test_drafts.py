"""Drafts change no answer: not its tokens, their log probabilities or its end, whatever is drafted and whatever else
happens; and nobody loses memory for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from cllm.backends.fake import FakeBackend
from cllm.engine.params import SamplingParams
from cllm.engine.request import Request
from draft_kit import KINDS, Lone, ScriptedDrafter, by_answer
from engine_kit import GREEDY, LAYOUTS, make_request, reference
from fault_kit import Machine, Rig, Scenario, fail_every_call
from fault_scenarios import (
    cancels,
    elastic,
    forks,
    make_fake,
    mixed_prompts,
    moved_all_the_time,
    preempted_answer,
    preempted_prompt,
    rebuilds,
    shared_prefixes,
    windows,
    wrong_positions,
)
from same_answers import CONTEXT, SameAnswers, in_blocks, in_slots
from thorough import exhaustive, sampled
from window_kit import windowed_reference

# -- the same answers ------------------------------------------------------------------------------------------------

PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 40)},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 3.0]),
        "seed": st.integers(0, 3),
        "n": st.integers(1, 3),
        "top_k": st.sampled_from([0, 5]),
        "top_p": st.sampled_from([1.0, 0.9]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "logit_bias": st.sampled_from([{}, {97: 5.0, 98: -100.0}]),
        "min_tokens": st.sampled_from([0, 1, 12]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (101, 32), tuple(range(97, 105))]),
        "logprobs": st.sampled_from([None, 0, 3]),
    },
)


def _consistent(params: dict[str, Any]) -> dict[str, Any]:
    return params | {"min_tokens": min(params.get("min_tokens", 0), params["max_tokens"])}


def requests_of(asked: list[tuple[str, dict[str, Any]]]) -> list[Request]:
    return [
        make_request(prompt, SamplingParams(**_consistent(params)), request_id=f"asked {number}")
        for number, (prompt, params) in enumerate(asked)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=sampled(60), deadline=None)
@given(
    asked=st.lists(st.tuples(st.text("ab", min_size=1, max_size=30), PARAMS), min_size=1, max_size=4),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    seed=st.integers(0, 999),
    tokens=st.sampled_from([96, 160, 1024]),
)
def test_answers_are_those_without_drafts(
    layout: str, asked: list[tuple[str, dict[str, Any]]], kinds: list[str], seed: int, tokens: int
) -> None:
    """And so are those of whoever goes on where they ended, with what is left of them in the cache."""
    plain = Lone(layout, tokens=tokens)
    expected = by_answer(plain.run(*requests_of(asked)))
    drafter = ScriptedDrafter(reference, kinds, seed=seed)
    drafted = Lone(layout, drafter, tokens=tokens)
    assert by_answer(drafted.run(*requests_of(asked))) == expected
    counted = drafted.scheduler.requests
    assert counted.accepted_drafts <= counted.drafted_tokens == sum(count for _, count, _ in drafter.steps)
    assert counted.generated_tokens == plain.scheduler.requests.generated_tokens

    for number, (prompt, _) in enumerate(asked):
        said = [told[0] for told in expected[f"asked {number}", 0]]
        next_turn = make_request([*prompt.encode(), *said, 65], GREEDY)
        drafted.run(next_turn)
        (answer,) = by_answer([each for each in drafted.outputs if each.request_id == next_turn.id]).values()
        assert [told[0] for told in answer] == reference(next_turn)


@pytest.mark.usefixtures("quiet")
class SameAnswersWithDrafts(SameAnswers):
    """Slots and blocks with drafts, and blocks without: cancelled, out of time, out of memory, with faults."""

    @initialize(blocks=st.sampled_from([28, 40, 128]), seed=st.integers(0, 999))
    def start(self, blocks: int, seed: int) -> None:  # type: ignore[override]
        slots, paged = in_slots(), in_blocks(FakeBackend(context_length=CONTEXT), blocks)
        plain = in_blocks(FakeBackend(context_length=CONTEXT), blocks)
        self.begin([*(with_drafts(machine, seed) for machine in (slots, paged)), plain])


SameAnswersWithDrafts.TestCase.settings = settings(max_examples=sampled(20), stateful_step_count=25, deadline=None)
TestSameAnswersWithDrafts = SameAnswersWithDrafts.TestCase


def with_drafts(machine: Machine, seed: int = 0) -> Machine:
    drafter = ScriptedDrafter(machine.expected, seed=seed, longest=9)
    return replace(machine, drafter=drafter)


@exhaustive
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "scenario", [mixed_prompts, shared_prefixes, forks, cancels, preempted_prompt, preempted_answer, rebuilds]
)
def test_every_call_may_fail(layout: str, scenario: Scenario) -> None:
    def make() -> Machine:
        return with_drafts(make_fake(layout, scenario))

    reached = Rig(make())
    scenario(reached)
    assert {"kv.grow_within_free", "kv.truncate"} <= set(reached.calls.names)
    runs = fail_every_call(make, scenario, ("error", "bug"))
    print(f"{layout} {scenario.__name__} with drafts: {runs}")


@exhaustive
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_call_may_fail_with_windows(layout: str) -> None:
    known: dict[str, list[int]] = {}

    def expected(request: Request, index: int) -> list[int]:
        key = repr((request.prompt, request.params, request.sequences[0].window, index))
        if key not in known:
            known[key] = windowed_reference(request, layout, index)
        return known[key]

    fail_every_call(lambda: with_drafts(replace(make_fake(layout, windows), expected=expected)), windows)


@exhaustive
@pytest.mark.usefixtures("quiet")
def test_every_call_may_fail_while_blocks_move() -> None:
    fail_every_call(lambda: with_drafts(elastic("always")), moved_all_the_time, ("error", "bug"))


@exhaustive
@pytest.mark.usefixtures("quiet")
def test_a_slot_with_something_else_in_it_is_computed_anew() -> None:
    fail_every_call(lambda: with_drafts(make_fake("slots", wrong_positions)), wrong_positions, ("error",))
