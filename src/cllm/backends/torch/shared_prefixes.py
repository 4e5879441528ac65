"""Rows that begin with the same blocks: a decode step reads what they share once for all of them.

The context is cut into splits anyway, and a split that lies in the shared beginning is computed for up to `TOGETHER`
rows at a time; each row goes on from its first own split. Who shares what is found anew for every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32]
Rows = NDArray[np.intp]

TOGETHER = 16
FEWEST_ROWS = 8
LEAST_TOKENS = 512
"""What fewer rows, or rows of a shorter beginning, share is not worth a launch."""
SHARED_SPLIT = 256
MOST_SPLITS = 32


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The same on the device, int32."""

    members: Tensor
    """[tiles, TOGETHER]: rows; -1: none"""
    extents: Tensor
    """[tiles]: how many splits the rows of a tile share"""
    firsts: Tensor
    """[decode rows]: the first split that a row reads by itself"""
    split: int


class Groups(NamedTuple):
    members: Ints
    extents: Ints
    firsts: Ints
    split: int

    def pack(self, words: Ints) -> None:
        """Into `packed_size` numbers, as `unpacked` expects them."""
        tiles, rows = most_tiles(len(self.firsts)), len(self.firsts)
        members, extents, firsts = np.split(words, [tiles * TOGETHER, tiles * (TOGETHER + 1)])
        members[: self.members.size] = self.members.ravel()
        extents[: len(self.extents)] = self.extents
        firsts[:rows] = self.firsts


def packed_size(rows: int) -> int:
    return most_tiles(rows) * (TOGETHER + 1) + rows


def unpacked(words: Tensor, rows: int, longest: int) -> SharedPrefixes:
    """Empty tiles have an extent of 0."""
    tiles = most_tiles(rows)
    members, extents, firsts = words.split([tiles * TOGETHER, tiles, rows])
    return SharedPrefixes(members.view(tiles, TOGETHER), extents, firsts, shared_split(longest))


def most_tiles(rows: int) -> int:
    """Most tiles for groups of this many rows, for graphs, which have a fixed number."""
    return -(-rows // FEWEST_ROWS)


def shared_split(longest: int) -> int:
    split = SHARED_SPLIT
    while split * MOST_SPLITS < longest:
        split *= 2
    return split


def find_shared(
    tables: Ints, lengths: Ints, block_size: int, longest: int, *, rows: int | None = None
) -> Groups | None:
    """Groups of decode rows, or None where nothing is worth it.

    `tables` is [rows, blocks], `longest` the number of positions that kernels are launched for. `rows` is how many
    there are with those that nobody uses.
    """
    split = shared_split(longest)
    usable = (lengths - 1) // split  # one position of its own is left to every row
    least, deepest = -(-LEAST_TOKENS // split), int(usable.max(initial=0))
    if split % block_size or len(lengths) < FEWEST_ROWS or deepest < least:
        return None
    marks = _marks(tables, split // block_size, deepest)
    groups = _alike(np.flatnonzero(usable >= least), marks[:, least - 1])
    found = [part for group in groups for part in _best(marks, usable, group, least)[1]]
    found = [(_equal(tables, part, depth * split // block_size), depth) for part, depth in found]
    return _tiled(found, rows or len(lengths), split) if found else None


def find_shared_in(
    table: Ints, begins: Ints, lengths: Ints, block_size: int, longest: int, *, rows: int | None = None
) -> Groups | None:
    """The same of rows whose blocks are in one list, each beginning where `begins` says."""
    if len(lengths) < FEWEST_ROWS or int(lengths.max()) <= LEAST_TOKENS:
        return None
    _, counts = np.unique(table[begins[:-1]], return_counts=True)
    if int(counts.max()) < FEWEST_ROWS:
        return None
    places = begins[:-1, None] + np.arange(int(np.diff(begins).max()))
    tables = table[np.minimum(places, len(table) - 1)]
    return find_shared(tables, lengths, block_size, longest, rows=rows)


@lru_cache(maxsize=64)
def _odd_numbers(size: int) -> NDArray[np.uint64]:
    odd: NDArray[np.uint64] = np.random.default_rng(size).integers(1 << 62, size=size, dtype=np.uint64)
    odd *= np.uint64(2)
    odd += np.uint64(1)
    return odd


def _marks(tables: Ints, blocks: int, depth: int) -> NDArray[np.uint64]:
    """[rows, depth]: a number for the blocks up to each split's end, equal where they are."""
    size = blocks * depth
    marks: NDArray[np.uint64] = np.cumsum(
        (tables[:, :size].astype(np.uint64) + np.uint64(1)) * _odd_numbers(size), axis=1
    )
    return marks[:, blocks - 1 :: blocks]


def _alike(rows: Rows, marks: NDArray[np.uint64]) -> list[Rows]:
    """Groups of rows that have the same mark, if they are enough."""
    _, places, counts = np.unique(marks[rows], return_inverse=True, return_counts=True)
    return [rows[places == place] for place in np.flatnonzero(counts >= FEWEST_ROWS)]


def _best(marks: NDArray[np.uint64], usable: Ints, rows: Rows, depth: int) -> tuple[int, list[tuple[Rows, int]]]:
    """How to divide rows that share `depth` splits to save most reads: how many, and parts with their depth."""
    same = (marks[rows] == marks[rows[0]]).all(axis=0)
    common = len(same) if same.all() else int(same.argmin())
    depth = max(depth, min(common, int(usable[rows].min())))
    here = _saved(len(rows), depth)
    if depth == marks.shape[1]:
        return here, [(rows, depth)]
    below = [_best(marks, usable, part, depth + 1) for part in _alike(rows[usable[rows] > depth], marks[:, depth])]
    found = [part for _, parts in below for part in parts]
    rest = np.setdiff1d(rows, np.concatenate([rows[:0], *(part for part, _ in found)]), assume_unique=True)
    if len(rest) >= FEWEST_ROWS:
        below.append((_saved(len(rest), depth), [(rest, depth)]))
        found.append((rest, depth))
    deeper = sum(saved for saved, _ in below)
    return (deeper, found) if deeper > here else (here, [(rows, depth)])


def _saved(rows: int, depth: int) -> int:
    return depth * (rows - -(-rows // TOGETHER))


def _equal(tables: Ints, rows: Rows, blocks: int) -> Rows:
    """Marks may be equal by chance: those rows that really begin like the first."""
    same: Rows = rows[(tables[rows, :blocks] == tables[rows[0], :blocks]).all(axis=1)]
    return same


def _tiled(found: list[tuple[Rows, int]], rows: int, split: int) -> Groups:
    firsts = np.zeros(rows, np.int32)
    pieces = [
        (group[first : first + TOGETHER], depth) for group, depth in found for first in range(0, len(group), TOGETHER)
    ]
    members = np.full((len(pieces), TOGETHER), -1, np.int32)
    extents = np.zeros(len(members), np.int32)
    for tile, (piece, depth) in enumerate(pieces):
        members[tile, : len(piece)] = piece
        extents[tile] = depth
        firsts[piece] = depth
    return Groups(members, extents, firsts, split)
