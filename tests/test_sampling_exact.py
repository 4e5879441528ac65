"""Choosing tokens, compared with a slow and obvious reference: a full sort, in float64, step by step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cllm.engine.draw import draw, largest, mix64, uniform
from cllm.engine.params import SamplingParams
from cllm.engine.sampling import TokenChooser, choose


def reference_values(
    logits: NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: frozenset[int],
    mask: Sequence[bool] | None,
) -> list[float]:
    values = [float(value) for value in logits]
    for token in range(len(values)):
        if mask is not None and not mask[token]:
            values[token] = -math.inf
        values[token] = float(np.float32(values[token] + params.logit_bias.get(token, 0.0)))
        if token in end_ids and len(output) < params.min_tokens:
            values[token] = -math.inf
        value, count = values[token], list(output).count(token)
        if token in prompt or count:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        values[token] = float(np.float32(value))
    return values


def reference_draw(
    values: Sequence[float], u: float, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """The tokens whose share of the CDF holds u: one, or several if u is within a millionth of their borders."""
    order = sorted((i for i, value in enumerate(values) if value > -math.inf), key=lambda i: (-values[i], i))
    peak = values[order[0]]
    weights = {token: math.exp((values[token] - peak) / temperature) for token in order}
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        mass = top_p * sum(weights[token] for token in order)
        running = itertools.accumulate(weights[token] for token in order)
        size = next((i + 1 for i, total in enumerate(running) if total >= mass), len(order))
        order = order[:size]
    kept = sorted(token for token in order if weights[token] >= min_p and weights[token] > 0.0)
    ends = list(itertools.accumulate(weights[token] for token in kept))
    low, high = (u - 1e-6) * ends[-1], (u + 1e-6) * ends[-1]
    starts = [0.0, *ends[:-1]]
    return {token for token, start, end in zip(kept, starts, ends, strict=True) if start <= high and end >= low}


def reference_answers(values: Sequence[float], u: float, truncation: Mapping[str, Any]) -> set[int]:
    """The answers for every top_p and min_p within a millionth: more than one only right on a border."""
    near = (1.0, 1.0 - 1e-6, 1.0 + 1e-6)
    answers = set()
    for by_p, by_m in itertools.product(near, near):
        top_p = truncation["top_p"] * by_p if truncation["top_p"] < 1.0 else 1.0
        min_p = min(truncation["min_p"] * by_m, 1.0)
        answers |= reference_draw(values, u, **{**truncation, "top_p": top_p, "min_p": min_p})
    return answers


TEMPERATURES = st.sampled_from([1e-6, 0.1, 0.7, 1.0, 1.5, 5.0])
TRUNCATIONS = st.fixed_dictionaries(
    {
        "temperature": TEMPERATURES,
        "top_k": st.sampled_from([0, -1, 1, 2, 5, 40, 700, 1500, 10**9]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    }
)
LOGIT = st.one_of(
    st.sampled_from([-math.inf, -1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 3.0]),
    st.floats(-60, 60, width=32),
)
FINITE_ROW = st.lists(LOGIT, min_size=2, max_size=40).filter(lambda row: max(row) > -math.inf)


@settings(max_examples=400, deadline=None)
@given(row=FINITE_ROW, truncation=TRUNCATIONS, u=st.floats(0, 1, exclude_max=True))
def test_draws_what_the_reference_draws(row: list[float], truncation: dict[str, Any], u: float) -> None:
    values = np.array(row, np.float32)
    answers = reference_answers([float(value) for value in values], u, truncation)
    assert draw(values, float(values.max()), u, **truncation) in answers


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1023, 1024, 3000, 4096]),
    spread=st.sampled_from([0.0, 0.01, 0.5, 3.0]),
    step=st.sampled_from([0.0, 0.25]),
    truncation=TRUNCATIONS,
    u=st.floats(0, 1, exclude_max=True),
)
def test_draws_what_the_reference_draws_from_many(
    seed: int, size: int, spread: float, step: float, truncation: dict[str, Any], u: float
) -> None:
    """Flat, peaked and full of ties: with rows that are longer than one group and nuclei of thousands."""
    values = np.random.default_rng(seed).normal(0.0, spread, size).astype(np.float32)
    if step:
        values = np.round(values / np.float32(step)) * np.float32(step)
    answers = reference_answers([float(value) for value in values], u, truncation)
    assert draw(values, float(values.max()), u, **truncation) in answers


@settings(max_examples=300, deadline=None)
@given(data=st.data(), row=FINITE_ROW, greedy=st.booleans(), truncation=TRUNCATIONS)
def test_chooses_what_the_reference_chooses(
    data: st.DataObject, row: list[float], greedy: bool, truncation: dict[str, Any]
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
    chooser = TokenChooser(params, prompt, end_ids=end_ids, seed=9, vocab_size=len(row))
    output: list[int] = []
    for _ in range(4):
        values = reference_values(logits[0], params, prompt, output, end_ids, mask)
        [choice] = choose(logits, [(0, chooser)], None if mask is None else [np.array(mask)])
        if max(values) == -math.inf:
            assert choice is None
            return
        assert choice is not None
        u = uniform(mix64(9), len(output))
        expected = {values.index(max(values))} if greedy else reference_answers(values, u, truncation)
        assert choice.token_id in expected
        output.append(choice.token_id)
        assert chooser.generated == len(output)


@given(st.integers(0, 2**32), st.integers(1, 1100), st.sampled_from([5, 1024, 2500]))
@settings(max_examples=60, deadline=None)
def test_largest_is_a_stable_sort_cut_off(seed: int, count: int, size: int) -> None:
    values = np.random.default_rng(seed).integers(-40, 40, size).astype(np.float32)
    values[values < -30] = -np.inf
    order = [token for token in np.argsort(-values, kind="stable") if values[token] > -np.inf]
    assert largest(values, count).tolist() == sorted(order[:count])


LAST = 1.0 - 2.0**-53
"""The largest u there is: it selects the last token that is left."""


def test_the_nucleus_of_equal_tokens_ends_exactly_where_it_is_reached() -> None:
    values = np.zeros(4096, np.float32)
    assert draw(values, 0.0, LAST, temperature=1.0, top_k=0, top_p=0.5, min_p=0.0) == 2047
    assert draw(values, 0.0, LAST, temperature=1.0, top_k=64, top_p=0.5, min_p=0.0) == 31


def test_a_large_nucleus_ends_exactly_where_it_is_reached() -> None:
    values = np.full(4096, -1.0, np.float32)
    values[:1024] = 0.0
    total = 1024 + 3072 * math.exp(-1)
    size = 1024 + math.ceil((0.9 * total - 1024) / math.exp(-1))
    assert draw(values, 0.0, LAST, temperature=1.0, top_k=0, top_p=0.9, min_p=0.0) == size - 1


def test_rounding_never_selects_an_impossible_token() -> None:
    for seed in range(100):
        values = np.random.default_rng(seed).normal(0, 8, 250).astype(np.float32)
        values[200:] = -np.inf
        assert draw(values, float(values.max()), LAST, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) < 200


def test_the_uniform_numbers() -> None:
    assert mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first output for seed 0
    stream = [uniform(mix64(4), counter) for counter in range(2000)]
    assert all(0.0 <= u < 1.0 for u in stream)
    assert len(set(stream)) == 2000
    assert np.mean(stream) == pytest.approx(0.5, abs=0.03)
    neighbours = [uniform(mix64(5), counter) for counter in range(2000)]
    assert abs(np.corrcoef(stream, neighbours)[0, 1]) < 0.1
