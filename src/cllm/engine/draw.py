"""What decides a draw beside the row itself: random numbers without state, penalties, and constraints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import repeat
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.backends.base import Seen
from cllm.engine.params import SamplingParams

Row = NDArray[np.float32]

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
