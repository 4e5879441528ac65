"""Drawing one token from one row of values: pure functions, exact, without sorting the vocabulary.

A row is processed alone and always in the same way, so its result never depends on what else is in the batch.
Weights are relative to the best token, which weighs 1. That cannot overflow, however small the temperature is.

Whole rows are weighed in float32 (about 1e-7 of error). Sums, and the few candidates that a truncation leaves,
are float64.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.intp]
Weights = NDArray[np.float64]

_GROUPS = 1024
_BLOCK = 256
_LOWEST = float(np.finfo(np.float32).min)
_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)
_MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """The finaliser of SplitMix64: every bit of the answer depends on every one of the 64 bits of `value`."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def uniform(key: int, counter: int) -> float:
    """The number in [0, 1) that belongs to `counter` in the stream `key`: no state, so nothing to save or lose."""
    return (mix64(key + (counter + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def draw(values: Row, peak: float, u: float, *, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """The token that `u` in [0, 1) selects: temperature, then top_k, top_p and min_p, then the inverse CDF.

    `peak` is the largest of `values`, and finite. top_p counts the mass of what top_k left. The CDF runs over the
    remaining tokens in the order of their ids.
    """
    temperature = max(temperature, _SMALLEST_TEMPERATURE)
    if 0 < top_k < len(values):
        ids, total = largest(values, top_k), None
    else:
        row_weights = relative_weights(values, peak, temperature)
        if top_p >= 1.0 and min_p <= 0.0:
            return _pick_from_row(row_weights, u)
        total = float(row_weights.sum(dtype=np.float64))
        # Tokens lighter than (1 - top_p) * total / len hold less than 1 - top_p together, so top_p is reached
        # without them. Half of either limit leaves room for the rounding of float32.
        light = 0.5 * max(min_p, (1.0 - top_p) * total / len(values))
        ids = np.flatnonzero(row_weights > light)
    found = values[ids]
    weights = np.exp((found.astype(np.float64) - peak) / temperature)
    if top_p < 1.0:
        size = _nucleus_size(weights, top_p * (float(weights.sum()) if total is None else total))
        ids, weights = _keep(_best(found, size), ids, weights)
    if min_p > 0.0:
        ids, weights = _keep(weights >= min_p, ids, weights)
    cumulative = np.cumsum(weights)
    return int(ids[_pick(cumulative, u * float(cumulative[-1]))])


def relative_weights(values: Row, peak: float, temperature: float) -> Row:
    """exp((values - peak) / temperature)."""
    weights = values - np.float32(peak)
    if temperature != 1.0:
        weights /= np.float32(temperature)
    return np.exp(weights, out=weights)


def log_total(values: Row, peak: float) -> float:
    """The logarithm of the sum of exp(values)."""
    return peak + math.log(float(relative_weights(values, peak, 1.0).sum(dtype=np.float64)))


def largest(values: Row, count: int) -> Ids:
    """Ids of the `count` (at least 1) largest values, in the order of ids.

    Of equal values the lowest ids; never a -inf, even if that leaves fewer than `count`.
    """
    floor = _LOWEST
    rows = len(values) // _GROUPS
    if rows and count <= _GROUPS:
        # The count-th largest of the maxima of disjoint groups is at most the count-th largest value.
        maxima = values[: rows * _GROUPS].reshape(rows, _GROUPS).max(axis=0)
        floor = max(floor, float(np.partition(maxima, -count)[-count]))
    ids = np.flatnonzero(values >= np.float32(floor))
    return ids[_best(values[ids], count)]


def _best(values: Row, count: int) -> NDArray[np.bool_]:
    """Which ones are the `count` (at least 1) largest values; of equal ones the first."""
    if count >= len(values):
        return np.ones(len(values), np.bool_)
    cut = np.partition(values, -count)[-count]
    chosen = values > cut
    chosen[np.flatnonzero(values == cut)[: count - int(np.count_nonzero(chosen))]] = True
    return chosen


def _nucleus_size(weights: Weights, mass: float) -> int:
    """How many of the heaviest it takes to reach `mass`: at least one."""
    heaviest_first = np.sort(weights)[::-1]
    return int(np.searchsorted(np.cumsum(heaviest_first), mass)) + 1


def _keep(chosen: NDArray[np.bool_], ids: Ids, weights: Weights) -> tuple[Ids, Weights]:
    return ids[chosen], weights[chosen]


def _pick(cumulative: Weights, mass: float) -> int:
    """The first index whose cumulative weight passes `mass`; never one that weighs nothing."""
    index = int(np.searchsorted(cumulative, mass, side="right"))
    if index < len(cumulative):
        return index
    # Rounding took `mass` up to the total: the last index that weighs something.
    return int(np.searchsorted(cumulative, cumulative[-1], side="left"))


def _pick_from_row(weights: Row, u: float) -> int:
    """`_pick` over a whole row, in two levels: a running sum of every token would cost five times as much."""
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64))
    mass = u * float(blocks[-1])
    block = _pick(blocks, mass)
    start = block * _BLOCK
    before = float(blocks[block - 1]) if block else 0.0
    inside = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    return start + _pick(inside, mass - before)
