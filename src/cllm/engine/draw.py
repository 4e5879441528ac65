"""Draws one token from one row of values: pure functions that avoid sorting the vocabulary.

csrc/sampling.cpp does the same, faster; row_sampler.py uses that where it is built.

A row is processed alone and always in the same way, so its result never depends on what else is in the batch.
Weights are relative to the best token, whose weight is 1: nothing overflows, however small the temperature.

Weights of whole rows are float32, exact to about 1e-7; sums are float64, and so are the weights of the few candidates
that a truncation usually leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import repeat
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.backends.base import Seen
from cllm.engine.params import SamplingParams

Row = NDArray[np.float32]
Ids = NDArray[np.intp]
Weights = NDArray[np.float64]

_GROUPS = 1024
_FEW = 512
_BLOCK = 256
_LOWEST = float(np.finfo(np.float32).min)
_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)
_MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """The finaliser of SplitMix64: every bit of the result depends on every bit of `value`."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def uniform(key: int, counter: int) -> float:
    """The number in [0, 1) at position `counter` of the stream `key`. There is no state."""
    return (mix64(key + (counter + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


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


_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Penalties:
    """The tokens one answer has seen, and how much less likely that makes each.

    Repetition looks at prompt and answer, as in vLLM; frequency and presence at the answer alone, as in OpenAI's
    API and vLLM.
    """

    __slots__ = (
        "_counts",
        "_drops",
        "_frequency",
        "_ids",
        "_places",
        "_presence",
        "_prompt_ids",
        "_repetition",
        "_size",
        "active",
    )

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        repeats = self._repetition != 1.0
        self.active = repeats or self._frequency != 0.0 or self._presence != 0.0
        # Counted, not sorted: a prompt may be long, and this runs on the event loop.
        seen = np.flatnonzero(np.bincount(np.asarray(prompt, np.intp))) if repeats else np.empty(0)
        # Parallel arrays, one entry per distinct token: its id, how often it was generated, its penalty. Those of the
        # prompt's tokens come first, in order of ids, and never move.
        self._ids = self._prompt_ids = seen.astype(np.int32)
        self._places: dict[int, int] = {}
        self._size = len(seen)
        self._counts = np.zeros(len(seen), np.int32)
        self._drops = np.zeros(len(seen))

    def twin(self) -> Penalties:
        """A copy for another answer to the same prompt, before anything was generated."""
        twin = copy(self)
        twin._places = {}
        twin._counts = np.zeros_like(self._counts)
        twin._drops = np.zeros_like(self._drops)
        return twin

    def observe(self, token_id: int, times: int = 1) -> None:
        """Count a generated token."""
        place = int(self._prompt_ids.searchsorted(np.int32(token_id)))
        if place == len(self._prompt_ids) or self._prompt_ids[place] != token_id:
            place = self._places.setdefault(token_id, self._size)
        if place == self._size:
            self._size += 1
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token_id
        self._counts[place] += times
        self._drops[place] = self._frequency * self._counts[place] + self._presence

    def apply(self, values: Row) -> None:
        """Change `values` in place, in float64 rounded once."""
        size = self._size
        ids = self._ids[:size]
        seen = values[ids].astype(np.float64)
        if self._repetition != 1.0:
            seen = np.where(seen > 0.0, seen / self._repetition, seen * self._repetition)
        # A tiny repetition penalty may overflow float32; the largest value is what it asks for.
        values[ids] = np.minimum(seen - self._drops[:size], _FLOAT32_MAX)

    def seen(self) -> Seen:
        """For a backend that draws itself. Valid until the next token is observed."""
        size = self._size
        return Seen(self._ids[:size], self._counts[:size], self._repetition, self._frequency, self._presence)

    def _grow(self) -> None:
        """New arrays: the old ones may be shared with another answer."""
        spare = len(self._ids) + 64
        self._ids = np.concatenate([self._ids, np.zeros(spare, np.int32)])
        self._counts = np.concatenate([self._counts, np.zeros(spare, np.int32)])
        self._drops = np.concatenate([self._drops, np.zeros(spare)])


Mask = NDArray[np.int32]
"""A bit per token, lowest first: may it be chosen? Bits after the last token have no meaning."""


class Constraint(Protocol):
    """Constraints on an answer, as the engine sees them: which tokens may come next, and which must.

    A constraint depends on the answer's tokens alone. It is given each one as it is chosen, so nothing has to be saved
    when its sequence waits, is preempted or is recomputed.

        accepted   … {"name":            the answer so far
        forced               ␣"          the only way to continue: taken without sampling, and computed as one chunk
        mask                    a b c …  several ways: the next token is sampled from these
    """

    @property
    def masks(self) -> Masks:
        """Fills the masks of all constraints of this model together."""

    @property
    def forced(self) -> Sequence[int]:
        """The tokens that must come next; at the end of the answer one that ends it."""

    def accept(self, token: int) -> None:
        """The answer continues with this token. Raises if it may not, or if that exceeds a limit."""

    def agreed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens could follow, one after another."""

    def twin(self) -> Constraint:
        """A copy for another answer, of one that has accepted nothing."""


class Grammar(Protocol):
    """A compiled structure."""

    def start(self) -> Constraint:
        """The constraint of an answer that has no tokens yet."""


class Masks(Protocol):
    def fill(self, constraints: Sequence[Any]) -> list[Mask | Exception]:
        """For each of these constraints, all of its own kind: the tokens it allows next, or why there is no mask. Valid
        until the next call."""


def masks_for(constraints: Sequence[Constraint | None]) -> list[Mask | Exception | None] | None:
    """For each constraint the tokens it allows next, or why there is no mask; None if there are no constraints."""
    limited = [constraint for constraint in constraints if constraint is not None]
    if not limited:
        return None
    filled: Iterator[Mask | Exception]
    try:
        filled = iter(limited[0].masks.fill(limited))
    except Exception as error:
        filled = repeat(error)
    return [None if constraint is None else next(filled) for constraint in constraints]


def leaves_some(mask: Mask, tokens: NDArray[np.intp]) -> bool:
    """Whether any token other than these may be chosen."""
    left = mask.view(np.uint32).copy()
    np.bitwise_and.at(left, tokens >> 5, ~(np.uint32(1) << (tokens & 31).astype(np.uint32)))
    return bool(left.any())
