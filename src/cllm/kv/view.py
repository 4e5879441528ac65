"""The cache as a picture: who holds which piece of memory. Made only while somebody looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

FREE = 0
"""Number of the holder of a cell that nobody holds."""

MOST_PREFIXES = 200
"""Prefixes in a picture."""

MOST_NODES = 2000
"""Prefixes that are looked at for the largest ones."""

FIRST_TOKENS = 32
"""Tokens of a prefix that a picture has."""


class PrefixView(NamedTuple):
    """A node of the prefix tree."""

    number: int
    """Its number as a holder of cells."""
    parent: int
    """The node it goes on from, 0 for none."""
    tokens: int
    """Tokens on its edge."""
    hits: int
    """Times it was found in the cache."""
    users: int
    """Running sequences whose path runs through it."""
    first_tokens: tuple[int, ...]
    """How its edge begins."""
    pins: int = 0
    """Pins on it; without users and pins it is evictable."""
    name: bytes = b""
    """Of its last block, as events have it; paged backends."""


class SequenceView(NamedTuple):
    """A running sequence."""

    number: int
    """Its number as a holder of cells that nobody shares."""
    request_id: str
    tokens: int
    computed: int


@dataclass(frozen=True, slots=True)
class KVView:
    """One moment of the cache, for who wants to look at it.

    A cell is a block (paged) or a fixed piece of a slot. `holders[i]` is the number of the prefix or the sequence that
    holds cell i, or `FREE`.
    """

    layout: Literal["paged", "slots"]
    cell_tokens: int
    cell_bytes: int
    holders: NDArray[np.int32]
    resident: NDArray[np.bool_]
    """Whether the memory of each extent, of `extent_cells` cells, is taken from the OS."""
    extent_cells: int
    prefixes: tuple[PrefixView, ...]
    """The largest ones, parents included."""
    prefixes_in_all: int
    used_prefixes: frozenset[int]
    """Numbers of all prefixes with users, listed or not."""
    sequences: tuple[SequenceView, ...]
