"""Groups of layers with equal needs, and how their K and V lie in memory.

    arena    equal cells of `cell_bytes`
    full     layers that attend to all tokens: a block of tokens takes one cell, from the first block on
    local    layers that attend to the last `window` tokens: a block takes `cells` cells, and is free behind the window

A layer's part of a block lies in one cell: of a group's layers, the first `cell_bytes // layer_bytes` are in its first
cell, and so on. A model whose layers all attend to everything, or all to a window, has one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class KVGroup:
    layers: tuple[int, ...]
    window: int
    """Tokens that its layers attend to; 0: all."""
    layer_bytes: int
    """K and V of a block's tokens in one layer."""
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
    """`apart`: local layers get a group of their own, if there are full ones and the layers of each kind are equal."""
    full, local = ([layer for layer in layers if bool(layer.window) is windowed] for windowed in (False, True))
    if not (apart and full and local and _equal(full) and _equal(local)):
        size = sum(layer.block_bytes for layer in layers)
        return KVLayout(block_size, size, (_group(layers, size // max(1, len(layers)), cells=1),))
    cell = max(sum(layer.block_bytes for layer in full), local[0].block_bytes)
    cells = -(-len(local) // (cell // local[0].block_bytes))
    groups = _group(full, full[0].block_bytes, cells=1), _group(local, local[0].block_bytes, cells=cells)
    return KVLayout(block_size, cell, groups)


def _equal(layers: Iterable[LayerKV]) -> bool:
    return len({layer.block_bytes for layer in layers}) == 1


def _group(layers: Sequence[LayerKV], layer_bytes: int, *, cells: int) -> KVGroup:
    windows = [layer.window for layer in layers]
    return KVGroup(tuple(layer.number for layer in layers), max(windows) if all(windows) else 0, layer_bytes, cells)


class LocalBlock:
    """A block of the local layers. Tables of running sequences and pinned snapshots use it, snapshots keep it; when
    nobody does either, its cells are free."""

    __slots__ = ("cells", "kept", "number", "users")

    def __init__(self, cells: list[int]) -> None:
        self.cells = cells
        self.users = 0
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
