"""The few statistics the benchmarks report, each with its uncertainty where noise could be taken for a result."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
_SEED = 20_240
"""Fixed, so that the same measurements always give the same interval."""

_Z = 1.96
# Student's t at 97.5 % for 1, 2, 3 … degrees of freedom; from there on the normal distribution is near enough.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)


class Interval(NamedTuple):
    """An estimate and its 95 % confidence interval; without one where a single value is all there is."""

    estimate: float
    low: float
    high: float

    @property
    def is_point(self) -> bool:
        return self.low == self.estimate == self.high

    def holds(self, value: float) -> bool:
        return not self.is_point and self.low <= value <= self.high


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values, as numpy does it."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent))


def last_fifth_over_first(values: Sequence[float]) -> float:
    """Median of the last fifth over the median of the first: 1 means that nothing got slower."""
    size = max(1, len(values) // 5)
    return median(values[-size:]) / median(values[:size])


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least-squares slope of y over x."""
    x = np.asarray(xs, dtype=np.float64)
    y = np.asarray(ys, dtype=np.float64)
    return float(_slopes(x[None, :], y[None, :])[0])


def slope_interval(xs: Sequence[float], ys: Sequence[float]) -> Interval:
    """The slope of y over x, bootstrapped in blocks of neighbours.

    Neighbours in time are alike (a slow minute of the machine slows all of its requests). Drawing them one by one would
    call such a spell a trend; drawing whole blocks does not.
    """
    x = np.asarray(xs, dtype=np.float64)
    y = np.asarray(ys, dtype=np.float64)
    estimate = slope(xs, ys)
    if len(x) < 4:
        return Interval(estimate, estimate, estimate)
    block = max(1, round(len(x) ** (1 / 3)))
    blocks = -(-len(x) // block)
    draw = np.random.default_rng(_SEED)
    starts = draw.integers(0, len(x) - block + 1, (RESAMPLES, blocks, 1))
    chosen = (starts + np.arange(block)).reshape(RESAMPLES, -1)[:, : len(x)]
    slopes = _slopes(x[chosen], y[chosen])
    slopes = slopes[np.isfinite(slopes)]
    low, high = np.percentile(slopes, (2.5, 97.5)) if len(slopes) else (estimate, estimate)
    return Interval(estimate, float(low), float(high))


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """The geometric mean of the ratios of several repeats, bootstrapped over the repeats.

    A plain percentile interval is far too narrow for a handful of values (of three, it holds the truth in 74 of 100
    cases instead of 95), so it is stretched as Student's t asks for.
    """
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    count = len(logs)
    estimate = float(np.exp(logs.mean()))
    if count < 2:
        return Interval(estimate, estimate, estimate)
    draw = np.random.default_rng(_SEED)
    means = logs[draw.integers(0, count, (RESAMPLES, count))].mean(axis=1)
    stretch = (_T[count - 2] if count - 2 < len(_T) else _Z) / _Z * (count / (count - 1)) ** 0.5
    low, high = np.exp(logs.mean() + stretch * (np.percentile(means, (2.5, 97.5)) - logs.mean()))
    return Interval(estimate, float(low), float(high))


def percent_more(key: str, ratios: Sequence[float]) -> dict[str, float]:
    """Under `key`, how much more the first of each pair takes than the second, in percent; its interval beside it."""
    found = ratio_interval(ratios)
    ends = {key: found.estimate, f"{key}_low": found.low, f"{key}_high": found.high}
    return {name: (ratio - 1) * 100 for name, ratio in ends.items()}


def _slopes(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """The slope of every row; nan where all x of a row are the same."""
    centred = x - x.mean(axis=1, keepdims=True)
    spread = (centred * centred).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        result: NDArray[np.float64] = (centred * (y - y.mean(axis=1, keepdims=True))).sum(axis=1) / spread
    return result
