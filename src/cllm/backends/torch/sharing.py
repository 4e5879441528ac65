"""Rows that begin with the same blocks: what they share is read once in a decode step, for all of them.

The context is cut into splits anyway, and a split that lies in the shared beginning is computed for up to `TOGETHER`
rows at a time; each row goes on from its first own split. Sequences only grow, and blocks that move do so for all rows
that name them: groups stay right as long as the rows of a step are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int32]

TOGETHER = 16
FEWEST_ROWS = 8
LEAST_TOKENS = 512
"""What fewer rows, or rows of a shorter beginning, share is not worth a launch."""
SHARED_SPLIT = 256
MOST_SPLITS = 32


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The same on the device, int32."""

    members: torch.Tensor
    """[tiles, TOGETHER]: rows; -1 is nobody"""
    extents: torch.Tensor
    """[tiles]: how many splits the rows of a tile share"""
    firsts: torch.Tensor
    """[decode rows]: the first split that a row reads by itself"""
    split: int


class Groups(NamedTuple):
    members: Ints
    extents: Ints
    firsts: Ints
    split: int


def most_tiles(rows: int) -> int:
    """Tiles that groups of so many rows can have, for graphs: theirs have a fixed number."""
    return -(-rows // FEWEST_ROWS)


def shared_split(longest: int) -> int:
    split = SHARED_SPLIT
    while split * MOST_SPLITS < longest:
        split *= 2
    return split


def find_shared(
    tables: Ints, lengths: Ints, block_size: int, longest: int, *, rows: int | None = None, tiles: int | None = None
) -> Groups | None:
    """Groups of decode rows, or None where nothing is worth it.

    `tables` is [rows, blocks], `longest` the number of positions that kernels are launched for. `rows` and `tiles` pad
    the answer to the sizes of a graph.
    """
    split = shared_split(longest)
    least = -(-LEAST_TOKENS // split)
    if split % block_size or len(lengths) < FEWEST_ROWS:
        return None
    usable = (lengths - 1) // split  # one position of its own is left to every row
    candidates = np.flatnonzero(usable >= least)
    found: list[tuple[Ints, int]] = []
    while len(candidates) >= FEWEST_ROWS:
        begins, places = np.unique(tables[candidates, 0], return_inverse=True)
        sizes = np.bincount(places, minlength=len(begins))
        largest = int(sizes.argmax())
        if sizes[largest] < FEWEST_ROWS:
            break
        alike = candidates[places == largest]
        depths = np.minimum(_common_blocks(tables, alike) * block_size // split, usable[alike])
        chosen, depth = _best(alike, depths, least)
        if depth:
            found.append((chosen.astype(np.int32), depth))
            candidates = np.setdiff1d(candidates, chosen, assume_unique=True)
        else:  # whoever came first is like nobody else
            candidates = candidates[candidates != alike[0]]
    return _tiled(found, rows or len(lengths), tiles, split) if found else None


def _common_blocks(tables: Ints, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """How many blocks each begins with like the first of them."""
    differ = tables[rows] != tables[rows[0]]
    common: NDArray[np.intp] = np.where(differ.any(1), differ.argmax(1), tables.shape[1])
    return common


def _best(rows: NDArray[np.intp], depths: NDArray[np.intp], least: int) -> tuple[NDArray[np.intp], int]:
    """Those rows, and how many splits of them, that save most reads."""
    best, saved = 0, 0
    for depth in np.unique(depths[depths >= least]).tolist():
        count = int((depths >= depth).sum())
        saves = depth * (count - -(-count // TOGETHER))
        if count >= FEWEST_ROWS and saves > saved:
            best, saved = depth, saves
    return rows[depths >= best], best


def _tiled(found: list[tuple[Ints, int]], rows: int, tiles: int | None, split: int) -> Groups:
    firsts = np.zeros(rows, np.int32)
    pieces = [
        (group[first : first + TOGETHER], depth) for group, depth in found for first in range(0, len(group), TOGETHER)
    ]
    members = np.full((tiles or len(pieces), TOGETHER), -1, np.int32)
    extents = np.zeros(len(members), np.int32)
    for tile, (piece, depth) in enumerate(pieces):
        members[tile, : len(piece)] = piece
        extents[tile] = depth
        firsts[piece] = depth
    return Groups(members, extents, firsts, split)
