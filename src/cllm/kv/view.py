"""A snapshot of the cache: which sequence or prefix holds each piece of memory. Made only while somebody watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.kv.groups import GroupKind

FREE = 0
"""The holder of a free cell."""

MOST_PREFIXES = 200
"""Prefixes in a view."""

MOST_NODES = 2000
"""Prefixes examined to find the largest."""

FIRST_TOKENS = 32
"""Tokens shown of each prefix."""


class PrefixView(NamedTuple):
    """A node of the prefix tree."""

    number: int
    """Its id as a holder of cells."""
    parent: int
    """Its parent node, 0: none."""
    tokens: int
    """Tokens on its edge."""
    hits: int
    """Times it was found in the cache."""
    users: int
    """Running sequences that use it."""
    first_tokens: tuple[int, ...]
    """The first tokens on its edge."""
    pins: int = 0
    """Pins on it. With neither users nor pins it is evictable."""
    name: bytes = b""
    """The name of its last block, as in events; paged backends."""
    snapshots: int = 0
    """Places on its edge where layers with a window or a state can go on."""


class SequenceView(NamedTuple):
    """A running sequence."""

    number: int
    """Its id as a holder of unshared cells."""
    request_id: str
    tokens: int
    computed: int


class GroupCells(NamedTuple):
    """Cells of layers that do not keep all tokens."""

    kind: GroupKind
    cells: NDArray[np.int32]
    used: NDArray[np.bool_]
    """Whether a running sequence uses the cell."""


@dataclass(frozen=True, slots=True)
class KVView:
    """The cache at one moment.

    A cell is a block (paged) or a fixed piece of a slot. `holders[i]` is the id of the prefix or sequence that holds
    cell i, or `FREE`.
    """

    layout: Literal["paged", "slots"]
    cell_tokens: int
    cell_bytes: int
    holders: NDArray[np.int32]
    resident: NDArray[np.bool_]
    """For each extent of `extent_cells` cells: whether the OS backs it with memory."""
    extent_cells: int
    prefixes: tuple[PrefixView, ...]
    """The largest ones, parents included."""
    prefixes_in_all: int
    used_prefixes: frozenset[int]
    """Ids of all prefixes with users, listed or not."""
    sequences: tuple[SequenceView, ...]
    groups: tuple[GroupCells, ...] = ()
    """Beside the full layers, whose are all other cells."""
