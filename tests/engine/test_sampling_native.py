"""The extension's way of choosing tokens against numpy's: the same tokens, from any thread, whatever the input."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cllm.engine.row_sampler import RowSampler
from sampling_kit import NATIVE, NUMPY, TRUNCATIONS, long_rows, reference_answers, sampler
from thorough import sampled


@pytest.fixture(scope="module", params=NATIVE)
def native(request: pytest.FixtureRequest) -> RowSampler:
    name: str = request.param
    return sampler(name)


@settings(max_examples=sampled(150), deadline=None)
@given(
    values=long_rows([200, 1500, 5000, 49_152]),
    truncation=TRUNCATIONS,
    us=st.lists(st.floats(0, 1, exclude_max=True), min_size=8, max_size=8),
)
def test_native_draws_what_numpy_draws(
    native: RowSampler, values: NDArray[np.float32], truncation: dict[str, Any], us: list[float]
) -> None:
    """The same token, unless `u`, `top_p` or `min_p` is within a millionth of where it changes to the other one."""
    peak = float(values.max())
    for u in us:
        drawn, expected = (each.draw(values, peak, u, **truncation) for each in (native, NUMPY))
        if drawn != expected:
            answers = reference_answers(values.tolist(), u, truncation)
            assert {drawn, expected} <= answers, f"u = {u}"


def test_native_differs_from_numpy_next_to_never(native: RowSampler) -> None:
    """So the borders above are no excuse: of thousands of ordinary draws at most a handful are on one."""
    random = np.random.default_rng(3)
    different = 0
    for _ in range(40):
        values = random.normal(0.0, 2.5, 49_152).astype(np.float32)
        peak = float(values.max())
        for truncation in ((1.0, 0, 1.0, 0.0), (0.8, 40, 0.95, 0.0), (1.0, 0, 0.95, 0.0), (1.5, 0, 0.9, 0.01)):
            fields: dict[str, Any] = dict(zip(("temperature", "top_k", "top_p", "min_p"), truncation, strict=True))
            for u in random.random(10).tolist():
                different += native.draw(values, peak, u, **fields) != NUMPY.draw(values, peak, u, **fields)
    assert different <= 5


def test_threads_share_a_sampler(native: RowSampler) -> None:
    table = np.random.default_rng(4).normal(0.0, 2.0, (8, 20_000)).astype(np.float32)
    work = [(table[i % 8, : 20_000 - 777 * i], u) for i in range(16) for u in (0.1, 0.5, 0.9)]

    def one(values: NDArray[np.float32], u: float) -> tuple[int, float, list[int]]:
        peak = float(values.max())
        drawn = native.draw(values, peak, u, temperature=1.5, top_k=0, top_p=0.95, min_p=0.0)
        return drawn, native.log_total(values, peak), native.largest(values, 30).tolist()

    alone = [one(*each) for each in work]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(lambda each: one(*each), work)) == alone


def test_native_refuses_what_makes_no_sense(native: RowSampler) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values, empty = np.zeros(4, np.float32), np.empty(0, np.float32)
    with pytest.raises(ValueError, match="0 values"):
        native.draw(empty, 0.0, 0.5, **fields)
    with pytest.raises(ValueError, match="0 values"):
        native.argmax(empty)
    for peak in (math.inf, math.nan):
        with pytest.raises(ValueError, match="not finite"):
            native.draw(values, peak, 0.5, **fields)
        with pytest.raises(ValueError, match="not finite"):
            native.log_total(values, peak)
    with pytest.raises(ValueError, match="count is 0"):
        native.largest(values, 0)
    with pytest.raises(ValueError, match="no finite value"):
        native.draw(np.full(4, -np.inf, np.float32), 0.0, 0.5, **fields | {"top_k": 2})


@settings(max_examples=sampled(150), deadline=None)
@given(data=st.data(), truncation=TRUNCATIONS, u=st.floats())
def test_native_survives_rows_that_are_not_what_they_should_be(
    native: RowSampler, data: st.DataObject, truncation: dict[str, Any], u: float
) -> None:
    """NaN, infinities, a peak that is none: any token or a ValueError, but no crash and no endless search."""
    size = data.draw(st.sampled_from([1, 40, 1100, 6000]))
    values = np.random.default_rng(size).normal(0.0, 2.0, size).astype(np.float32)
    for bad in data.draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 3e38, -3e38]), max_size=4)):
        values[data.draw(st.integers(0, size - 1)) :: data.draw(st.integers(1, 50))] = bad
    try:
        drawn = native.draw(values, data.draw(st.floats(-3e38, 3e38)), u, **truncation)
    except ValueError:
        return
    assert 0 <= drawn < size
    assert all(0 <= each < size for each in native.largest(values, 50))
