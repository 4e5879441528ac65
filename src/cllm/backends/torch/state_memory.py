"""Where the arena has the states of layers that carry one.

All states of a sequence are one block of several cells. A layer's part of it is what each head has, and then what its
convolution has of each earlier token; parts that lie one behind another are read and written together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cllm.kv.groups import StatePlace
from cllm.models.spec import DeltaNetSpec, Mamba2Spec, RecurrenceSpec, ShortConvSpec

FLOAT = 4


@dataclass(frozen=True, slots=True)
class _Run:
    """Values at the same place of some cells of a block that follow each other."""

    cell: int
    cells: int
    values: Tensor
    """[cells of the arena, values], in the arena"""

    @property
    def size(self) -> int:
        return self.cells * int(self.values.shape[1])


@dataclass(frozen=True, slots=True)
class StateParts:
    """Equal parts of a state, one after another."""

    shape: tuple[int, ...]
    runs: tuple[_Run, ...]

    def read(self, cells: Tensor, fresh: Tensor | None) -> Tensor:
        """A copy of each row's parts, [rows, *shape]. `cells` is [rows, cells of a block]; `fresh` rows get zeros."""
        cells = cells.clamp(min=0)
        out = torch.empty((len(cells), sum(run.size for run in self.runs)), dtype=torch.float32, device=cells.device)
        for part, run in zip(self._parts(out), self.runs, strict=True):
            part.copy_(run.values[cells[:, run.cell : run.cell + run.cells]])
        if fresh is not None:
            out.masked_fill_(fresh[:, None], 0.0)
        return out.view(len(cells), *self.shape)

    def write(self, cells: Tensor, states: Tensor) -> None:
        for part, run in zip(self._parts(states.flatten(1)), self.runs, strict=True):
            run.values[cells[:, run.cell : run.cell + run.cells]] = part

    def _parts(self, rows: Tensor) -> Iterator[Tensor]:
        """What each run has of the rows, [rows, cells, values]."""
        parts = rows.split([run.size for run in self.runs], dim=1)
        return (part.unflatten(1, (run.cells, -1)) for part, run in zip(parts, self.runs, strict=True))


@dataclass(frozen=True, slots=True)
class StateMemory:
    """A layer's part of every state."""

    heads: StateParts
    """[heads, values, keys] of a row"""
    inputs: StateParts
    """[earlier tokens, channels] of a row"""
    arena: Tensor
    """[cells, values]"""
    places: Tensor
    """[2, heads], int64: the cell of a state's block that each head's part is in, and from which value on"""


def state_memory(arena: Tensor, spec: RecurrenceSpec, places: Sequence[StatePlace]) -> StateMemory:
    """`arena` is [cells, values], `places` those of the layer's parts."""
    heads: tuple[int, ...] = 0, 0, 0
    if isinstance(spec, DeltaNetSpec):
        heads, channels = (spec.n_v_heads, spec.head_dim_v, spec.head_dim_k), spec.conv_size
    elif isinstance(spec, Mamba2Spec):
        heads, channels = (spec.n_heads, spec.head_dim, spec.state_size), spec.conv_size
    else:
        assert isinstance(spec, ShortConvSpec)
        channels = spec.size
    return StateMemory(
        _state_parts(arena, places[: heads[0]], heads[1] * heads[2], heads),
        _state_parts(arena, places[heads[0] :], channels, (spec.kernel - 1, channels)),
        arena,
        torch.tensor(
            [[place.cell for place in places[: heads[0]]], [place.offset // FLOAT for place in places[: heads[0]]]],
            device=arena.device,
        ),
    )


def _state_parts(arena: Tensor, places: Sequence[StatePlace], size: int, shape: tuple[int, ...]) -> StateParts:
    """Parts of `size` values each, as a tensor of this shape. `arena` is [cells, values]."""
    runs: list[_Run] = []
    for cell, columns in _joined(places, size * FLOAT):
        values = arena[:, columns.start // FLOAT : columns.stop // FLOAT]
        if runs and runs[-1].cell + runs[-1].cells == cell and _same(runs[-1].values, values):
            runs[-1] = _Run(runs[-1].cell, runs[-1].cells + 1, values)
        else:
            runs.append(_Run(cell, 1, values))
    return StateParts(shape, tuple(runs))


def _joined(places: Sequence[StatePlace], size: int) -> Iterator[tuple[int, slice]]:
    """The bytes of each cell that parts lie in without a gap."""
    found: list[tuple[int, slice]] = []
    for cell, offset in places:
        if found and found[-1][0] == cell and found[-1][1].stop == offset:
            found[-1] = cell, slice(found[-1][1].start, offset + size)
        else:
            found.append((cell, slice(offset, offset + size)))
    return iter(found)


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(one.storage_offset() == other.storage_offset() and one.shape == other.shape)
