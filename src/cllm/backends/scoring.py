"""Scoring and pooling on the host, for backends that return logits and hidden states there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.backends.base import Chunk, Hidden, Logits, Pooling, PromptScores


def score_rows(logits: Logits, targets: Sequence[int], top: int) -> PromptScores:
    """Score each target by its row. A row without a finite maximum gives NaN."""
    rows = np.arange(len(targets))
    top = min(top, logits.shape[1])
    values = logits.astype(np.float64)
    peaks = values.max(axis=1, initial=-np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        totals = peaks + np.log(np.exp(values - peaks[:, None]).sum(axis=1))
        totals[~np.isfinite(peaks)] = np.nan
        chosen = values[rows, np.asarray(targets, np.intp)]
        ranks = 1 + (values > chosen[:, None]).sum(axis=1)
        ids = _largest(values, top)
        logprobs = np.take_along_axis(values, ids, axis=1) - totals[:, None]
    missing = ~np.isfinite(logprobs)
    return PromptScores(
        chosen - totals,
        ranks.astype(np.int32),
        np.where(missing, -1, ids).astype(np.int32),
        np.where(missing, 0.0, logprobs),
    )


def _largest(values: NDArray[np.float64], top: int) -> NDArray[np.intp]:
    """The ids of each row's largest values, best first; the lowest id of equals."""
    found = np.zeros((len(values), top), np.intp)
    for row, to in zip(values, found, strict=True):
        if top:
            least = np.partition(row, -top)[-top]
            better, equal = np.flatnonzero(row > least), np.flatnonzero(row == least)
            ids = np.concatenate([better, equal[: top - len(better)]])
            to[: len(ids)] = ids[np.argsort(-row[ids], kind="stable")]
    return found


def join_scores(parts: Sequence[PromptScores]) -> PromptScores:
    """Concatenate the scores of consecutive tokens."""
    if len(parts) == 1:
        return parts[0]
    return PromptScores(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def pool_rows(states: NDArray[np.floating], chunk: Chunk, asked: Pooling) -> Hidden:
    """Pool the hidden states of a chunk's tokens as it asks."""
    if asked.kind == "last":
        last: Hidden = states[-1].astype(np.float64)
        return last
    pooled = np.zeros(states.shape[1]) if asked.before is None else asked.before.copy()
    if asked.kind == "mean":
        for row in states:  # one by one, so that the result does not depend on chunking
            pooled += row
    elif chunk.start == 0:
        pooled += states[0]
    return pooled
