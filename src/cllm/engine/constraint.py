"""Constraints on an answer, as the engine sees them: which tokens may come next, and which must.

A constraint depends on the answer's tokens alone. It is given each one as it is chosen, so nothing has to be saved when
its sequence waits, is preempted or is recomputed.

    accepted   … {"name":            the answer so far
    forced               ␣"          the only way to continue: taken without sampling, and computed as one chunk
    mask                    a b c …  several ways: the next token is sampled from these
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]
"""A bit per token, lowest first: may it be chosen? Bits after the last token have no meaning."""


class Constraint(Protocol):
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
