"""From measured steps to a cost model: least squares in which no price may be negative."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.errors import CLLMError
from cllm_bench.simulate.cost import CostModel, StepWork

Matrix = NDArray[np.float64]

OUTLIER = 10.0
"""A step that is off by this many times the median error was disturbed, and is left out of the second fit."""

FEWEST_STEPS = 20


class StepRecord(NamedTuple):
    """One step as it was measured."""

    started: float
    ended: float
    work: StepWork
    chosen: int
    """Tokens that were chosen from its logits."""


def fit_cost(
    name: str,
    description: str,
    runs: Sequence[Sequence[StepRecord]],
    *,
    kv_bytes_per_token: int,
) -> CostModel:
    """`runs` are steps that followed one another without a rest."""
    steps = [step for run in runs for step in run]
    if len(steps) < FEWEST_STEPS:
        raise CLLMError(f"a cost model needs at least {FEWEST_STEPS} measured steps, there are {len(steps)}")
    work = np.array([(1, *step.work) for step in steps], dtype=np.float64)
    seconds = np.array([step.ended - step.started for step in steps])
    prices = _fit(work, seconds)
    between = [pair for run in runs for pair in pairwise(run)]
    around = np.array([(1, step.chosen) for step, _ in between], dtype=np.float64)
    overhead = _fit(around, np.array([following.started - step.ended for step, following in between]))
    return CostModel(
        name=name,
        description=description,
        step_s=float(prices[0]),
        row_s=float(prices[1]),
        context_s=float(prices[2]),
        chunk_s=float(prices[3]),
        prompt_token_s=float(prices[4]),
        attended_s=float(prices[5]),
        overhead_s=float(overhead[0]),
        overhead_row_s=float(overhead[1]),
        kv_bytes_per_token=kv_bytes_per_token,
    )


def median_error(cost: CostModel, steps: Sequence[StepRecord]) -> float:
    """How far off the model is for a typical step, as a share of what the step took."""
    seconds = np.array([step.ended - step.started for step in steps])
    predicted = np.array([cost.compute(step.work) for step in steps])
    return float(np.median(np.abs(predicted - seconds) / np.maximum(seconds, 1e-12)))


def _fit(features: Matrix, seconds: Matrix) -> Matrix:
    """Twice: the second time without the steps that something else disturbed."""
    seconds = np.maximum(seconds, 0.0)
    prices = _weighted(features, seconds)
    errors = np.abs(features @ prices - seconds) / np.maximum(seconds, 1e-9)
    sound = errors <= OUTLIER * max(float(np.median(errors)), 1e-3)
    return _weighted(features[sound], seconds[sound]) if sound.sum() >= FEWEST_STEPS // 2 else prices


def _weighted(features: Matrix, seconds: Matrix) -> Matrix:
    """Between absolute errors, which see long steps only, and relative ones, which see short steps only."""
    from scipy.optimize import nnls  # of the extra `bench`

    weights = 1 / np.sqrt(np.maximum(seconds, 1e-6))
    weighted = features * weights[:, None]
    # Columns are counts from one to millions; of equal length, they are all treated alike.
    lengths = np.linalg.norm(weighted, axis=0)
    lengths[lengths == 0] = 1.0
    prices: Matrix = nnls(weighted / lengths, seconds * weights)[0] / lengths
    return prices
