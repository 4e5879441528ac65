"""The few statistics the workloads report."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np


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
    centred = x - x.mean()
    return float((centred * (y - y.mean())).sum() / (centred * centred).sum())
