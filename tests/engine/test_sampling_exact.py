"""Choosing tokens, compared with a slow and obvious reference: a full sort, in float64, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cllm.engine.draw import mix64, uniform
from cllm.engine.params import SamplingParams
from cllm.engine.row_sampler import RowSampler
from cllm.engine.sampling import TokenChooser, choose
from sampling_kit import SAMPLERS, TRUNCATIONS, long_rows, packed, reference_answers, sampler
from thorough import sampled


@pytest.fixture(scope="module", params=SAMPLERS)
def rows(request: pytest.FixtureRequest) -> RowSampler:
    name: str = request.param
    return sampler(name)


def reference_values(
    logits: NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: frozenset[int],
    mask: Sequence[bool] | None,
) -> list[float]:
    values = [float(value) for value in logits]
    only_ends = mask is not None and not any(allowed and i not in end_ids for i, allowed in enumerate(mask))
    for token in range(len(values)):
        if mask is not None and not mask[token]:
            values[token] = -math.inf
        values[token] = float(np.float32(values[token] + params.logit_bias.get(token, 0.0)))
        if token in end_ids and len(output) < params.min_tokens and not only_ends:
            values[token] = -math.inf
        value, count = values[token], list(output).count(token)
        if token in prompt or count:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        values[token] = float(np.float32(value))
    return values


LOGIT = st.one_of(
    st.sampled_from([-math.inf, -1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 3.0]),
    st.floats(-60, 60, width=32),
)
FINITE_ROW = st.lists(LOGIT, min_size=2, max_size=40).filter(lambda row: max(row) > -math.inf)


@settings(max_examples=sampled(300), deadline=None)
@given(row=FINITE_ROW, truncation=TRUNCATIONS, u=st.floats(0, 1, exclude_max=True))
def test_draws_what_the_reference_draws(
    rows: RowSampler, row: list[float], truncation: dict[str, Any], u: float
) -> None:
    values = np.array(row, np.float32)
    answers = reference_answers([float(value) for value in values], u, truncation)
    assert rows.draw(values, float(values.max()), u, **truncation) in answers


@settings(max_examples=sampled(60), deadline=None)
@given(
    values=long_rows([1023, 1024, 3000, 4096]),
    truncation=TRUNCATIONS,
    u=st.floats(0, 1, exclude_max=True),
)
def test_draws_what_the_reference_draws_from_many(
    rows: RowSampler, values: NDArray[np.float32], truncation: dict[str, Any], u: float
) -> None:
    """With rows that are longer than one group and nuclei of thousands."""
    answers = reference_answers([float(value) for value in values], u, truncation)
    assert rows.draw(values, float(values.max()), u, **truncation) in answers


@settings(max_examples=sampled(200), deadline=None)
@given(data=st.data(), row=FINITE_ROW, greedy=st.booleans(), truncation=TRUNCATIONS)
def test_chooses_what_the_reference_chooses(
    rows: RowSampler, data: st.DataObject, row: list[float], greedy: bool, truncation: dict[str, Any]
) -> None:
    """All parameters together, over an answer of several tokens."""
    token = st.integers(0, len(row) - 1)
    if greedy:
        truncation = truncation | {"temperature": 0.0}
    params = SamplingParams(
        **truncation,
        logit_bias=data.draw(st.dictionaries(token, st.floats(-100, 100), max_size=3)),
        repetition_penalty=data.draw(st.sampled_from([0.5, 1.0, 1.3])),
        frequency_penalty=data.draw(st.sampled_from([-0.5, 0.0, 0.7])),
        presence_penalty=data.draw(st.sampled_from([-0.5, 0.0, 0.7])),
        min_tokens=data.draw(st.sampled_from([0, 2])),
    )
    prompt = data.draw(st.lists(token, max_size=5))
    end_ids = data.draw(st.frozensets(token, max_size=2))
    mask = data.draw(st.none() | st.lists(st.booleans(), min_size=len(row), max_size=len(row)))
    logits = np.array([row], np.float32)
    chooser = TokenChooser(params, prompt, end_ids=end_ids, seed=9, vocab_size=len(row), rows=rows)
    output: list[int] = []
    for _ in range(4):
        values = reference_values(logits[0], params, prompt, output, end_ids, mask)
        [choice] = choose(logits, [(0, chooser)], None if mask is None else [packed(mask)])
        if max(values) == -math.inf:
            assert choice is None
            return
        assert choice is not None
        u = uniform(mix64(9), len(output))
        expected = {values.index(max(values))} if greedy else reference_answers(values, u, truncation)
        assert choice.token_id in expected
        output.append(choice.token_id)
        assert chooser.generated == len(output)


@given(seed=st.integers(0, 2**32), count=st.integers(1, 1100), size=st.sampled_from([5, 1024, 2500]))
@settings(max_examples=sampled(60), deadline=None)
def test_largest_is_a_stable_sort_cut_off(rows: RowSampler, seed: int, count: int, size: int) -> None:
    values = np.random.default_rng(seed).integers(-40, 40, size).astype(np.float32)
    values[values < -30] = -np.inf
    order = [token for token in np.argsort(-values, kind="stable") if values[token] > -np.inf]
    assert rows.largest(values, count).tolist() == sorted(order[:count])


def test_argmax_is_the_first_of_the_best_or_the_first_nan(rows: RowSampler) -> None:
    for size in (1, 7, 8, 16, 255, 256, 257, 1000):
        table = np.random.default_rng(size).integers(-3, 3, (50, size)).astype(np.float32)
        table[10:20, size // 2] = np.inf
        table[20:30, size // 3 :] = np.nan
        table[30] = -np.inf
        table[31] = -0.0
        table[31, size // 2 :] = 0.0
        assert [rows.argmax(row) for row in table] == table.argmax(axis=1).tolist()


def test_the_logarithm_of_the_total(rows: RowSampler) -> None:
    for size in (1, 9, 300, 5000):
        values = np.random.default_rng(size).normal(30.0, 5.0, size).astype(np.float32)
        values[1::7] = -np.inf
        exact = math.log(math.fsum(math.exp(value) for value in values.tolist()))
        assert rows.log_total(values, float(values.max())) == pytest.approx(exact, abs=2e-7)


LAST = 1.0 - 2.0**-53
"""The largest u there is: it selects the last token that is left."""


def test_the_nucleus_of_equal_tokens_ends_exactly_where_it_is_reached(rows: RowSampler) -> None:
    values = np.zeros(4096, np.float32)
    assert rows.draw(values, 0.0, LAST, temperature=1.0, top_k=0, top_p=0.5, min_p=0.0) == 2047
    assert rows.draw(values, 0.0, LAST, temperature=1.0, top_k=64, top_p=0.5, min_p=0.0) == 31
    assert rows.draw(values, 0.0, LAST, temperature=1.0, top_k=3000, top_p=0.5, min_p=0.0) == 1499
    assert rows.draw(values, 0.0, LAST, temperature=1.0, top_k=3000, top_p=1.0, min_p=1.0) == 2999


def test_a_large_nucleus_ends_exactly_where_it_is_reached(rows: RowSampler) -> None:
    values = np.full(4096, -1.0, np.float32)
    values[:1024] = 0.0
    total = 1024 + 3072 * math.exp(-1)
    size = 1024 + math.ceil((0.9 * total - 1024) / math.exp(-1))
    assert rows.draw(values, 0.0, LAST, temperature=1.0, top_k=0, top_p=0.9, min_p=0.0) == size - 1


def test_a_top_k_of_thousands_is_as_exact_as_a_small_one(rows: RowSampler) -> None:
    values = np.random.default_rng(8).permutation(20_000).astype(np.float32) / np.float32(1e4)
    for count in (200, 256, 257, 512, 513, 5000, 19_999):
        last = np.flatnonzero(values >= np.sort(values)[-count])[-1]
        assert rows.draw(values, float(values.max()), LAST, temperature=5.0, top_k=count, top_p=1.0, min_p=0.0) == last


def test_a_top_k_beyond_what_is_allowed_keeps_all_of_that(rows: RowSampler) -> None:
    values = np.full(9000, -np.inf, np.float32)
    values[:6000:2] = np.linspace(-4.0, 4.0, 3000, dtype=np.float32)
    for top_p in (1.0, 1.0 - 1e-12):
        assert rows.draw(values, 4.0, LAST, temperature=3.0, top_k=4000, top_p=top_p, min_p=0.0) == 5998


def test_rounding_never_selects_an_impossible_token(rows: RowSampler) -> None:
    for seed in range(100):
        values = np.random.default_rng(seed).normal(0, 8, 250).astype(np.float32)
        values[200:] = -np.inf
        for top_p in (1.0, 1.0 - 2.0**-53):
            drawn = rows.draw(values, float(values.max()), LAST, temperature=1.0, top_k=0, top_p=top_p, min_p=0.0)
            assert drawn < 200


def test_a_top_p_next_to_one_keeps_all(rows: RowSampler) -> None:
    """Its mass may be beyond the sum in another order."""
    for seed in range(20):
        values = np.random.default_rng(seed).normal(0, 1, 5000).astype(np.float32)
        values[-1] = 4.0
        drawn = rows.draw(values, float(values.max()), LAST, temperature=2.0, top_k=0, top_p=1.0 - 2.0**-53, min_p=0.0)
        assert drawn == 4999


def test_the_uniform_numbers() -> None:
    assert mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first output for seed 0
    stream = [uniform(mix64(4), counter) for counter in range(2000)]
    assert all(0.0 <= u < 1.0 for u in stream)
    assert len(set(stream)) == 2000
    assert np.mean(stream) == pytest.approx(0.5, abs=0.03)
    neighbours = [uniform(mix64(5), counter) for counter in range(2000)]
    assert abs(np.corrcoef(stream, neighbours)[0, 1]) < 0.1
