"""Groups of layers with equal needs, and how their K and V lie in memory.

    arena    equal cells of `cell_bytes`
    full     layers that attend to all tokens: a block of tokens takes one cell, from the first block on
    local    layers that attend to the last `window` tokens: a block takes `cells` cells, and is free behind the window
    state    layers that carry a state from token to token: all of a sequence's is one block of `cells` cells

The layers of a group fill the cells of a block in their order, each wholly within one (of a state: every part of it). A
model whose layers all attend to everything, or all to a window, has one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal, NamedTuple

GroupKind = Literal["full", "window", "state"]
"""How layers keep memory: of all tokens, of those in their window, or of none."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    layers: tuple[int, ...]
    window: int
    """Tokens that its layers attend to; 0: all."""
    cells: int
    """Cells of a block."""
    reach: int = 0
    """With a window: for how many tokens before those that a token attends to these layers must be computed, if all
    are to be exact and nothing older is there. A layer's K and V come from what the windows below it let it see."""


class StatePlace(NamedTuple):
    """Where a part of a state lies: in which of its block's cells, and from which byte on."""

    cell: int
    offset: int


@dataclass(frozen=True, slots=True)
class StateGroup:
    layers: tuple[int, ...]
    places: tuple[tuple[StatePlace, ...], ...]
    """The places of every layer's parts."""
    cells: int
    """Cells of a block, which is the state of a sequence."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    block_size: int
    cell_bytes: int
    groups: tuple[KVGroup, ...]
    """The full layers, and then the local ones, if there are both."""
    states: StateGroup | None = None

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


class GroupCost(NamedTuple):
    """What layers with equal needs take."""

    kind: GroupKind
    layers: int
    window: int
    """Tokens that they attend to; 0: all."""
    bytes_per_token: int
    """What each token takes that they keep."""
    bytes_per_sequence: int | None
    """The most that a running sequence takes; None: it grows with every token."""


class LayerKV(NamedTuple):
    """A layer that keeps K and V."""

    number: int
    window: int
    block_bytes: int


class LayerState(NamedTuple):
    """A layer that carries a state. Each of its parts is contiguous, and as many bytes as it says."""

    number: int
    parts: tuple[int, ...]


STATE_ALIGNMENT = 64
"""Parts of a state begin at multiples of this."""


def plan_groups(
    layers: Sequence[LayerKV], block_size: int, *, apart: bool, states: Sequence[LayerState] = (), reach: int = 0
) -> KVLayout:
    """`apart`: local layers get a group of their own, if there are full ones; `reach` is theirs."""
    full, local = ([layer for layer in layers if bool(layer.window) is windowed] for windowed in (False, True))
    if not (apart and full and local):
        full, local = list(layers), []
    # Without any attention positions take no memory, but they are counted all the same.
    cell = max((block_size, _bytes(full), *(layer.block_bytes for layer in local)))
    if states:
        least, unit = max(cell, *(size for state in states for size in state.parts)), lcm(STATE_ALIGNMENT, block_size)
        cell = -(-least // unit) * unit
    groups: tuple[KVGroup, ...] = (_group(full, cells=1),)
    if local:
        groups += (replace(_group(local, cells=_cells_for(local, cell)), reach=reach),)
    return KVLayout(block_size, cell, groups, _state_group(states, cell) if states else None)


def _state_group(states: Sequence[LayerState], cell: int) -> StateGroup:
    cells, end = 1, 0
    places = []
    for state in states:
        own = []
        for size in state.parts:
            if end + size > cell:
                cells, end = cells + 1, 0
            own.append(StatePlace(cells - 1, end))
            end += _aligned(size)
        places.append(tuple(own))
    return StateGroup(tuple(state.number for state in states), tuple(places), cells)


def _aligned(size: int) -> int:
    return -(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT


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
    return KVGroup(tuple(layer.number for layer in layers), max(windows, default=0) if all(windows) else 0, cells)


class BlockTally:
    """How many blocks of a kind, of so many cells, there are, and how many of them nobody uses."""

    __slots__ = ("all", "cells", "evictable", "kind")

    def __init__(self, kind: GroupKind = "window", cells: int = 0) -> None:
        self.kind = kind
        self.cells = cells
        self.all = self.evictable = 0


class LocalBlock:
    """A block of the local layers, or a state. Tables of running sequences and pinned snapshots use it, snapshots keep
    it; when nobody does either, its cells are free."""

    __slots__ = ("cells", "kept", "number", "pins", "tally", "users")

    def __init__(self, cells: list[int], tally: BlockTally | None = None) -> None:
        self.cells = cells
        self.tally = tally or BlockTally()
        """Where blocks of its kind are counted."""
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


class StateTable:
    """A running sequence's state. A step reads one block and writes another, so a step that fails has changed nothing;
    when it has counted, the block it wrote is the sequence's."""

    __slots__ = ("computed", "current", "last", "last_computed", "next", "spare")

    def __init__(self, current: LocalBlock | None = None, computed: int = 0) -> None:
        self.current = current
        """The state after all that is computed; None: nothing is. Snapshots and twins may have it, too: it never
        changes."""
        self.computed = computed
        """After how many tokens."""
        self.last: LocalBlock | None = None
        """The state at the end of the last block before that."""
        self.last_computed = 0
        self.next: LocalBlock | None = None
        """The block that the next step writes."""
        self.spare: list[LocalBlock] = []

    @property
    def read(self) -> list[int]:
        """Cells of the state to go on from; none: a sequence begins."""
        return [] if self.current is None else self.current.cells

    @property
    def write(self) -> list[int]:
        return [] if self.next is None else self.next.cells

    def known_at_end(self, unit: int) -> int:
        """How many tokens are before the last state at the end of a block."""
        return self.last_computed if self.computed % unit else self.computed

    @property
    def blocks(self) -> list[LocalBlock]:
        """All that it uses."""
        return [block for block in (self.current, self.last, self.next, *self.spare) if block is not None]
