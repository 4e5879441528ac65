"""Choosing tokens: every parameter on its own, then rows, seeds and log probabilities; on every implementation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm.engine.params import SamplingParams
from cllm.engine.sampling import Choice, TokenChooser, choose
from cllm.errors import InvalidRequestError
from sampling_kit import SAMPLERS, choosing_with, packed, sampler

NO_IDS: frozenset[int] = frozenset()


@pytest.fixture(params=SAMPLERS, autouse=True)
def every_implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    with choosing_with(sampler(request.param)):
        yield


def make_chooser(
    params: SamplingParams, vocab: int, *, prompt: Sequence[int] = (), end_ids: frozenset[int] = NO_IDS, seed: int = 1
) -> TokenChooser:
    return TokenChooser(params, prompt, end_ids=end_ids, seed=seed, vocab_size=vocab)


def row_of(*values: float) -> NDArray[np.float32]:
    return np.array([values], np.float32)


def pick(logits: NDArray[np.float32], *, mask: Sequence[bool] | None = None, **fields: Any) -> int:
    """The token chosen first from the only row."""
    chooser = make_chooser(SamplingParams(**fields), logits.shape[1])
    masks = None if mask is None else [packed(mask)]
    [choice] = choose(logits, [(0, chooser)], masks)
    assert choice is not None
    return choice.token_id


def support(logits: NDArray[np.float32], **fields: Any) -> set[int]:
    """Every token that turns up in 400 draws."""
    choosers = [make_chooser(SamplingParams(**fields), logits.shape[1], seed=seed) for seed in range(400)]
    return {choice.token_id for choice in choose(logits, [(0, each) for each in choosers]) if choice}


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert pick(row_of(1, 5, 5, 2), temperature=0) == 1


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    logits = np.log(probabilities).astype(np.float32)[None]
    chooser = make_chooser(SamplingParams(temperature=1.0), 4, seed=3)
    counts = Counter(choice.token_id for _ in range(4000) if (choice := choose(logits, [(0, chooser)])[0]))
    assert [counts[token] / 4000 for token in range(4)] == pytest.approx(probabilities, abs=0.03)


def test_a_high_temperature_flattens_and_a_low_one_sharpens() -> None:
    logits = row_of(0, 1, 2)
    assert support(logits, temperature=100.0) == {0, 1, 2}
    assert support(logits, temperature=0.05) == {2}


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 5e-324])
def test_the_smallest_temperatures_do_not_overflow(temperature: float) -> None:
    logits = row_of(-3e38, 1.0, 1.0001, -math.inf, 3e38, 3e38)
    assert support(logits, temperature=temperature) == {4, 5}


def test_top_k_keeps_the_lowest_of_equal_ids() -> None:
    assert support(row_of(1, 1, 3, 1, 1), top_k=3) == {0, 1, 2}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = np.log(np.array([[0.2, 0.4, 0.3, 0.1]], np.float32))
    assert support(logits, top_p=0.69) == {1, 2}
    assert support(logits, top_p=0.71) == {0, 1, 2}
    assert support(logits, top_p=1e-12) == {1}


def test_a_top_k_beyond_every_integer_type_is_no_limit() -> None:
    assert support(row_of(0, 0, 0), top_k=10**30) == {0, 1, 2}


def test_top_p_counts_what_top_k_left() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    assert support(logits, top_k=2, top_p=0.56) == {0}


def test_top_p_of_a_flat_row_keeps_half_of_it() -> None:
    logits = np.zeros((1, 4096), np.float32)
    drawn = support(logits, top_p=0.5)
    assert max(drawn) < 2048
    assert len(drawn) > 300


def test_min_p_compares_with_the_best() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    assert support(logits, min_p=0.29) == {0, 1, 2}
    assert support(logits, min_p=0.31) == {0, 1}


def test_min_p_comes_after_top_p() -> None:
    """Coming first it would leave 0.5 and 0.3, and top_p = 0.6 of those 0.8 would be the first token alone."""
    logits = np.log(np.array([[0.5, 0.3, 0.1, 0.1]], np.float32))
    assert support(logits, top_p=0.6, min_p=0.5) == {0, 1}


def test_repetition_looks_at_prompt_and_output() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    logits = row_of(4.0, 3.0, 2.5, -1.0)
    chooser = make_chooser(params, 4, prompt=[0, 0])
    chosen = [choice.token_id for _ in range(3) if (choice := choose(logits, [(0, chooser)])[0])]
    assert chosen == [1, 2, 0]  # 4 / 2 from the start; then 3 / 2; then 2.5 / 2


def test_repetition_makes_negative_logits_smaller() -> None:
    chooser = make_chooser(SamplingParams(temperature=0, repetition_penalty=2.0), 2, prompt=[0])
    [choice] = choose(row_of(-1.0, -1.5), [(0, chooser)])
    assert choice == Choice(1, None)


def test_a_tiny_repetition_penalty_does_not_overflow() -> None:
    chooser = make_chooser(SamplingParams(temperature=1.0, repetition_penalty=1e-300), 3, prompt=[1])
    [choice] = choose(row_of(5.0, 1.0, 4.0), [(0, chooser)])
    assert choice == Choice(1, None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"frequency_penalty": 0.4}, [0, 0, 1, 0]),  # 1.0, 0.6, then 0.5 against 0.2, then 0.2 against 0.1
        ({"presence_penalty": 0.6}, [0, 1, 0, 0]),  # 1.0, then 0.5 against 0.4, then 0.4 against -0.1
    ],
)
def test_frequency_and_presence_look_at_the_output_alone(fields: dict[str, Any], expected: list[int]) -> None:
    chooser = make_chooser(SamplingParams(temperature=0, **fields), 2, prompt=[0] * 50)
    logits = row_of(1.0, 0.5)
    assert [choice.token_id for _ in range(4) if (choice := choose(logits, [(0, chooser)])[0])] == expected


def test_penalties_of_many_distinct_tokens() -> None:
    """A presence penalty that outweighs every difference visits each token once."""
    vocab = 300
    logits = np.linspace(1.0, 0.0, vocab, dtype=np.float32)[None]
    chooser = make_chooser(SamplingParams(temperature=0, presence_penalty=2.0), vocab)
    assert [choice.token_id for _ in range(vocab) if (choice := choose(logits, [(0, chooser)])[0])] == list(
        range(vocab)
    )


def test_logit_bias() -> None:
    assert pick(row_of(1, 2, 3), temperature=0, logit_bias={0: 5.0, 2: -100.0}) == 0


def test_mask() -> None:
    assert pick(row_of(1, 2, 3), temperature=0, mask=[True, True, False]) == 1
    assert pick(row_of(1, 2, 3), temperature=5.0, mask=[True, False, False]) == 0


def test_min_tokens_forbids_the_end() -> None:
    chooser = make_chooser(SamplingParams(temperature=0, min_tokens=2), 3, end_ids=frozenset({2}))
    logits = row_of(0, 1, 9)
    assert [choice.token_id for _ in range(4) if (choice := choose(logits, [(0, chooser)])[0])] == [1, 1, 2, 2]


def test_all_but_one_banned() -> None:
    logits = row_of(-math.inf, -math.inf, -7.0, -math.inf)
    for fields in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 100.0}):
        assert support(logits, **fields) == {2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_fails_alone(temperature: float, bad: float) -> None:
    logits = np.array([[0, 9], [bad, 1], [9, 0], [-math.inf, -math.inf]], np.float32)
    choosers = [make_chooser(SamplingParams(temperature=temperature, top_k=1), 2) for _ in range(4)]
    choices = choose(logits, list(enumerate(choosers)))
    assert choices == [Choice(1, None), None, Choice(0, None), None]
    assert [each.generated for each in choosers] == [1, 0, 1, 0]


def test_nothing_allowed_is_none() -> None:
    chooser = make_chooser(SamplingParams(), 2)
    assert choose(row_of(1, 2), [(0, chooser)], [np.array([False, False])]) == [None]


def test_nothing_wanted() -> None:
    assert choose(np.empty((0, 8), np.float32), []) == []


def test_ids_outside_of_the_vocabulary_are_refused_by_name() -> None:
    for fields in ({"logit_bias": {8: 1.0}}, {"logit_bias": {-1: 1.0}}, {"stop_token_ids": [8]}):
        with pytest.raises(InvalidRequestError, match="0 to 7") as caught:
            make_chooser(SamplingParams(**fields), 8)
        assert caught.value.param in fields


def answer(seed: int, logits: NDArray[np.float32], others: int, length: int = 12) -> list[int]:
    """One answer, generated beside `others` that share its row or have their own."""
    params = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.3)
    vocab = logits.shape[1]
    chooser = make_chooser(params, vocab, seed=seed)
    company = [(i % len(logits), make_chooser(params, vocab, seed=1000 + i)) for i in range(others)]
    chosen = []
    for _ in range(length):
        choice = choose(logits, [*company, (0, chooser)])[-1]
        assert choice is not None
        chosen.append(choice.token_id)
    return chosen


def test_a_seed_decides_whatever_else_is_running() -> None:
    logits = np.random.default_rng(5).normal(0, 1, (4, 2500)).astype(np.float32)
    alone = answer(11, logits, others=0)
    assert answer(11, logits, others=9) == alone
    assert answer(12, logits, others=0) != alone


def test_a_new_chooser_goes_on_where_the_old_one_was() -> None:
    logits = np.random.default_rng(6).normal(0, 1, (1, 500)).astype(np.float32)
    params = SamplingParams(temperature=1.0, frequency_penalty=1.0, repetition_penalty=1.2)
    old = make_chooser(params, 500, prompt=[1, 2, 3])
    new = make_chooser(params, 500, prompt=[1, 2, 3])
    for _ in range(10):
        [choice] = choose(logits, [(0, old)])
        assert choice is not None
        new.observe(choice.token_id)
    assert choose(logits, [(0, old)]) == choose(logits, [(0, new)])


def test_answers_of_one_prompt_share_a_row() -> None:
    logits = np.zeros((1, 64), np.float32)
    choosers = [make_chooser(SamplingParams(temperature=1.0), 64, seed=seed) for seed in range(8)]
    assert len({choice.token_id for choice in choose(logits, [(0, each) for each in choosers]) if choice}) > 3


def test_logits_are_not_modified() -> None:
    logits = np.random.default_rng(7).normal(0, 2, (1, 3000)).astype(np.float32)
    before = logits.copy()
    logits.flags.writeable = False
    everything = SamplingParams(
        temperature=0.7, top_p=0.999, min_p=0.01, logprobs=5, logit_bias={1: 2.0}, repetition_penalty=1.2, min_tokens=1
    )
    chooser = make_chooser(everything, 3000, prompt=[4, 5], end_ids=frozenset({2}))
    choose(logits, [(0, chooser), (0, make_chooser(SamplingParams(), 3000))], [np.ones(3000, np.bool_), None])
    assert np.array_equal(logits, before)


def test_logprobs_are_the_models_own() -> None:
    """Bias, penalties and temperature choose the token; they do not change what the model thought of it."""
    probabilities = np.array([0.1, 0.4, 0.2, 0.2, 0.1])
    logits = np.log(probabilities).astype(np.float32)[None] + np.float32(3)
    params = SamplingParams(temperature=0.3, logprobs=3, logit_bias={0: 100.0}, repetition_penalty=1.5)
    [choice] = choose(logits, [(0, make_chooser(params, 5, prompt=[1]))])
    assert choice is not None and choice.logprob is not None
    assert choice.token_id == choice.logprob.token_id == 0
    assert choice.logprob.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token for token, _ in choice.logprob.top] == [1, 2, 3]
    assert [value for _, value in choice.logprob.top] == pytest.approx(np.log([0.4, 0.2, 0.2]), abs=1e-6)


def test_logprobs_zero_reports_the_chosen_token_alone() -> None:
    [choice] = choose(row_of(0, 0), [(0, make_chooser(SamplingParams(temperature=0, logprobs=0), 2))])
    assert choice is not None and choice.logprob is not None
    assert choice.logprob.top == []
    assert choice.logprob.logprob == pytest.approx(-math.log(2))


def test_impossible_tokens_are_no_alternatives() -> None:
    params = SamplingParams(temperature=0, logprobs=4)
    [choice] = choose(row_of(1, -math.inf, 2, -math.inf), [(0, make_chooser(params, 4))])
    assert choice is not None and choice.logprob is not None
    assert [token for token, _ in choice.logprob.top] == [2, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_never_chosen(temperature: float) -> None:
    logits = np.array([[9.0, 1.0, 8.0, 0.0]], np.float32)
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    chooser = TokenChooser(params, [1], end_ids=frozenset(), forbidden=frozenset({0, 2}), seed=1, vocab_size=4)
    for _ in range(50):
        choice = choose(logits, [(0, chooser)])[0]
        assert choice is not None and choice.token_id in (1, 3)


def test_a_twin_chooses_as_a_chooser_of_its_own_would() -> None:
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(40, 60)).astype(np.float32)
    params = SamplingParams(
        repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.2, logit_bias={3: 2.0, 7: -5.0}, min_tokens=3
    )
    options: dict[str, Any] = {"prompt": [1, 2, 3, 2], "end_ids": frozenset({9})}
    first = make_chooser(params, 60, seed=1, **options)
    twins = [first, *(first.twin(seed) for seed in (2, 3))]
    alone = [make_chooser(params, 60, seed=seed, **options) for seed in (1, 2, 3)]
    for row in rows:  # in turn, so that what one has seen would show in the others
        assert [twin.choose(row, None) for twin in twins] == [chooser.choose(row, None) for chooser in alone]
