"""What an answer must look like, as the engine sees it: which tokens may come next, and which must.

A constraint is a function of the answer's tokens. It is shown each one as it is chosen, and so needs nothing saved when
its sequence waits, is preempted or is computed again.

    accepted   … {"name":            what the answer has
    forced               ␣"          one way to go on: taken as they are, without a draw, and computed as one chunk
    mask                    a b c …  several ways: the next token is chosen from these
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]
"""A bit for every token, the lowest of a word first: may it be chosen? What stands behind the last one says nothing."""


class Constraint(Protocol):
    @property
    def masks(self) -> Masks:
        """What fills the masks of this constraint and of others of the same model, together."""

    @property
    def forced(self) -> Sequence[int]:
        """The tokens that come next, whatever the model says; at the end of the answer one that ends it."""

    def accept(self, token: int) -> None:
        """The answer goes on with this token. Raises where it may not, or where that is more than the limits allow."""

    def agreed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens could follow, one after another."""

    def twin(self) -> Constraint:
        """For another answer, made of one that has accepted nothing."""


class Masks(Protocol):
    def fill(self, constraints: Sequence[Any]) -> list[Mask | Exception]:
        """For each of these constraints, which are of its own kind: which tokens it allows next, or why that cannot be
        said. Valid until the next call."""


def masks_for(constraints: Sequence[Constraint | None]) -> list[Mask | Exception | None] | None:
    """For each that is one which tokens it allows next, or why that cannot be said; None: there is none."""
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
    """Whether any token may be chosen that is none of these."""
    left = mask.view(np.uint32).copy()
    np.bitwise_and.at(left, tokens >> 5, ~(np.uint32(1) << (tokens & 31).astype(np.uint32)))
    return bool(left.any())
