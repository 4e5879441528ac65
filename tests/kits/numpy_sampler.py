"""How a token is drawn from a row, in numpy: what the extension's `RowSampler` is compared with, function by function.

It avoids sorting the vocabulary, as that does. Two samplers may differ by rounding: if `u` is within a millionth of the
border between two tokens, or a token that close to being cut off.

Weights of whole rows are float32, exact to about 1e-7; sums are float64, and so are the weights of the few candidates
that a truncation usually leaves.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.intp]
Weights = NDArray[np.float64]

_GROUPS = 1024
_FEW = 512
_BLOCK = 256
_LOWEST = float(np.finfo(np.float32).min)
_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


def argmax(values: Row) -> int:
    """The first of the largest values, or the first NaN, so that it also tells whether the row is valid."""
    return int(values.argmax())


def masked(values: Row, mask: NDArray[np.int32]) -> Row:
    """A copy, with -inf for every token whose bit in `mask` is 0; the lowest bit of a word is its first token."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(values))
    return np.where(bits, values, np.float32(-np.inf))


def draw(values: Row, peak: float, u: float, *, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """The token that `u` in [0, 1) selects: temperature, then top_k, top_p and min_p, then the inverse CDF.

    `peak` is the largest of `values`, and finite. top_p counts the mass of what top_k left. The CDF runs over
    the tokens that are left, in the order of their ids.
    """
    temperature = max(temperature, _SMALLEST_TEMPERATURE)
    if 0 < top_k < len(values):
        ids = largest(values, top_k)
        few = _exact_weights(values[ids], peak, temperature)
        mass = top_p * float(few.sum()) if top_p < 1.0 else math.inf
        return _draw_from_few(values, ids, few, mass, min_p, u)
    weights = relative_weights(values, peak, temperature)
    if top_p < 1.0:
        mass = top_p * float(weights.sum(dtype=np.float64))
        ids = np.flatnonzero(values >= np.float32(_floor(values, _FEW)))
        few = _exact_weights(values[ids], peak, temperature)
        if few.sum() >= mass:
            return _draw_from_few(values, ids, few, mass, min_p, u)
        _drop_tail(weights, values, peak, temperature, top_p, mass)
    if min_p > 0.0:
        weights *= weights >= min_p
    cumulative = _block_sums(weights)
    return _search_row(weights, cumulative, u * float(cumulative[-1]), "right")


def relative_weights(values: Row, peak: float, temperature: float) -> Row:
    """exp((values - peak) / temperature)."""
    weights: Row = values - np.float32(peak)
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
    ids = np.flatnonzero(values >= np.float32(_floor(values, count)))
    return ids[_best(values[ids], count)]


def _floor(values: Row, count: int) -> float:
    """A finite number that is at most the `count`-th largest of the finite values, and usually close to it."""
    rows = len(values) // _GROUPS
    if rows == 0 or count > _GROUPS:
        return _LOWEST
    # The count-th largest of the maxima of disjoint groups is at most the count-th largest value.
    maxima = values[: rows * _GROUPS].reshape(rows, _GROUPS).max(axis=0)
    return max(_LOWEST, float(np.partition(maxima, -count)[-count]))


def _best(values: Row, count: int) -> NDArray[np.bool_]:
    """Which ones are the `count` (at least 1) largest values; of equal ones the first."""
    if count >= len(values):
        return np.ones(len(values), np.bool_)
    cut = np.partition(values, -count)[-count]
    return _at_least(values, cut, count)


def _at_least(values: Row, cut: np.float32, count: int) -> NDArray[np.bool_]:
    """Which ones are the `count` largest, if `cut` is the smallest of those; of equal ones the first."""
    chosen: NDArray[np.bool_] = values >= cut
    surplus = int(np.count_nonzero(chosen)) - count
    if surplus > 0:
        chosen[np.flatnonzero(values == cut)[-surplus:]] = False
    return chosen


def _exact_weights(values: Row, peak: float, temperature: float) -> Weights:
    return np.exp((values.astype(np.float64) - peak) / temperature)


def _draw_from_few(values: Row, ids: Ids, weights: Weights, mass: float, min_p: float, u: float) -> int:
    """Draw from `ids`: the heaviest that together reach `mass`, at least one, and of those what min_p leaves."""
    size = int(np.searchsorted(np.cumsum(np.sort(weights)[::-1]), mass)) + 1
    chosen = _best(values[ids], size)
    if min_p > 0.0:
        chosen &= weights >= min_p
    cumulative = np.cumsum(weights * chosen)
    return int(ids[_search(cumulative, u * float(cumulative[-1]), "right")])


def _drop_tail(weights: Row, values: Row, peak: float, temperature: float, top_p: float, mass: float) -> None:
    """Set the weights to zero of all but the heaviest that together reach `mass`, which is top_p of them all."""
    # What is lighter than this holds less than 1 - top_p together, so `mass` is reached without it. The half
    # leaves room for the rounding of float32.
    light = 0.5 * (1.0 - top_p) / top_p * mass / len(values)
    descending = np.sort(values.compress(weights > light))[::-1]
    heaviest_first = relative_weights(descending, peak, temperature)
    last = _search_row(heaviest_first, _block_sums(heaviest_first), mass, "left")
    weights *= _at_least(values, descending[last], last + 1)


def _block_sums(weights: Row) -> Weights:
    """Running sums at the ends of blocks. For every token of a row they would cost five times as much."""
    return np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64))


def _search_row(weights: Row, block_sums: Weights, mass: float, side: Literal["left", "right"]) -> int:
    """`_search` over the running sums of a whole row."""
    block = _search(block_sums, mass, side)
    start = block * _BLOCK
    before = float(block_sums[block - 1]) if block else 0.0
    inside = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    return start + _search(inside, mass - before, side)


def _search(cumulative: Weights, mass: float, side: Literal["left", "right"]) -> int:
    """The first index whose running sum reaches ("left") or passes ("right") `mass`."""
    index = int(np.searchsorted(cumulative, mass, side=side))
    if index < len(cumulative):
        return index
    # Rounding put `mass` beyond the total: the last index that weighs something.
    return int(np.searchsorted(cumulative, cumulative[-1], side="left"))
