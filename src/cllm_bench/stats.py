"""The few statistics the benchmarks report, each with its uncertainty where noise could be taken for a result.

scipy, of the extra `bench`, is imported where it is used: it takes a second, and `cllm bench --help` needs none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
_SEED = 20_240
"""Fixed, so that the same measurements always give the same interval."""
_BATCH = 4_000_000
"""Values that are resampled at once: 32 MB."""


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
    return float(_slopes(np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)))


def slope_interval(xs: Sequence[float], ys: Sequence[float]) -> Interval:
    """The slope of y over x, bootstrapped in blocks of neighbours.

    Neighbours in time are alike (a slow minute of the machine slows all of its requests). Drawing them one by one would
    call such a spell a trend; drawing whole blocks does not.
    """
    from scipy.stats import bootstrap

    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    estimate = slope(xs, ys)
    if len(x) < 4:
        return Interval(estimate, estimate, estimate)
    block = round(len(x) ** (1 / 3))
    starts = np.arange(0, len(x) - block + 1, block)

    def of_blocks(chosen: NDArray[np.int64], axis: int) -> NDArray[np.float64]:
        rows = (chosen[..., None] + np.arange(block)).reshape(*chosen.shape[:-1], -1)
        return _slopes(x[rows], y[rows])

    batch = max(1, _BATCH // len(x))
    options = {"n_resamples": RESAMPLES, "batch": batch, "method": "percentile", "random_state": _SEED}
    low, high = bootstrap((starts,), of_blocks, **options).confidence_interval
    return Interval(estimate, float(low), float(high))


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """The geometric mean of the ratios of several repeats; its interval by Student's t, for repeats are few."""
    from scipy.stats import sem, t

    logs = np.log(np.asarray(ratios, dtype=np.float64))
    middle = logs.mean()
    half = t.ppf(0.975, len(logs) - 1) * sem(logs) if len(logs) > 1 else 0.0
    return Interval(*(float(np.exp(end)) for end in (middle, middle - half, middle + half)))


def percent_more(key: str, ratios: Sequence[float]) -> dict[str, float]:
    """Under `key`, how much more the first of each pair takes than the second, in percent; its interval beside it."""
    found = ratio_interval(ratios)
    ends = {key: found.estimate, f"{key}_low": found.low, f"{key}_high": found.high}
    return {name: (ratio - 1) * 100 for name, ratio in ends.items()}


def _slopes(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """The slope of every row, by least squares."""
    centred, risen = (each - each.mean(axis=-1, keepdims=True) for each in (x, y))
    slopes: NDArray[np.float64] = (centred * risen).sum(axis=-1) / (centred * centred).sum(axis=-1)
    return slopes
