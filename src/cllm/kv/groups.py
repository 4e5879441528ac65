"""Groups of layers with equal needs, and how their K and V lie in memory.

    arena    equal cells of `cell_bytes`
    full     layers that attend to all tokens: a block of tokens takes one cell, from the first block on
    local    layers that attend to the last `window` tokens: a block takes `cells` cells, and is free behind the window

The layers of a group fill the cells of a block in their order, each wholly within one. A model whose layers all attend
to everything, or all to a window, has one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class KVGroup:
    layers: tuple[int, ...]
    window: int
    """Tokens that its layers attend to; 0: all."""
    cells: int
    """Cells of a block."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    block_size: int
    cell_bytes: int
    groups: tuple[KVGroup, ...]
    """The full layers, and then the local ones, if there are both."""

    @property
    def local(self) -> KVGroup | None:
        return self.groups[1] if len(self.groups) > 1 else None

    @property
    def token_bytes(self) -> int:
        """What a token takes as long as its sequence is held, without local layers."""
        return self.cell_bytes // self.block_size

    @property
    def local_bytes(self) -> int:
        """What a token inside the window takes beside that."""
        return 0 if self.local is None else self.local.cells * self.token_bytes


class LayerKV(NamedTuple):
    """A layer that keeps K and V."""

    number: int
    window: int
    block_bytes: int


def plan_groups(layers: Sequence[LayerKV], block_size: int, *, apart: bool) -> KVLayout:
    """`apart`: local layers get a group of their own, if there are full ones."""
    full, local = ([layer for layer in layers if bool(layer.window) is windowed] for windowed in (False, True))
    if not (apart and full and local):
        return KVLayout(block_size, _bytes(layers), (_group(layers, cells=1),))
    cell = max(_bytes(full), *(layer.block_bytes for layer in local))
    return KVLayout(block_size, cell, (_group(full, cells=1), _group(local, cells=_cells_for(local, cell))))


def _bytes(layers: Sequence[LayerKV]) -> int:
    return sum(layer.block_bytes for layer in layers)


def _cells_for(layers: Sequence[LayerKV], cell: int) -> int:
    """Cells are filled one after another, each layer wholly in one."""
    cells, room = 0, 0
    for layer in layers:
        if layer.block_bytes > room:
            cells, room = cells + 1, cell
        room -= layer.block_bytes
    return cells


def _group(layers: Sequence[LayerKV], *, cells: int) -> KVGroup:
    windows = [layer.window for layer in layers]
    return KVGroup(tuple(layer.number for layer in layers), max(windows) if all(windows) else 0, cells)


class LocalBlock:
    """A block of the local layers. Tables of running sequences and pinned snapshots use it, snapshots keep it; when
    nobody does either, its cells are free."""

    __slots__ = ("cells", "kept", "number", "pins", "users")

    def __init__(self, cells: list[int]) -> None:
        self.cells = cells
        self.users = 0
        self.pins = 0
        """How many of the users are pinned snapshots."""
        self.kept = 0
        self.number = 0
        """Its id as the holder of its cells."""


class LocalTable:
    """A running sequence's local blocks: its block `first`, and those that follow, written or not yet."""

    __slots__ = ("blocks", "cells", "first")

    def __init__(self, first: int) -> None:
        self.first = first
        self.blocks: list[LocalBlock] = []
        self.cells: list[int] = []
        """The cells of all blocks, one after another, for the backend."""

    @property
    def end(self) -> int:
        """The first block behind the table."""
        return self.first + len(self.blocks)

    def append(self, block: LocalBlock) -> None:
        self.blocks.append(block)
        self.cells += block.cells

    def refresh(self) -> None:
        """Blocks have moved, or were replaced."""
        self.cells = [cell for block in self.blocks for cell in block.cells]
