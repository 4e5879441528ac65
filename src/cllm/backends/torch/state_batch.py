"""Where a step's rows read and write their states, and in which order their tokens go through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cllm.backends.base import Chunk
from cllm.errors import BackendError

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HostStates:
    """On the host."""

    reads: Ints
    """[rows, cells]: a row's state after all that is computed; -1: it begins"""
    writes: Ints
    """[rows, cells]: where its state goes"""
    starts: Ints
    """Where each row's tokens begin, and where the last one's end."""

    @property
    def begins(self) -> bool:
        """Whether some row does."""
        return bool((self.reads[:, 0] < 0).any())


@dataclass(frozen=True, slots=True)
class Turns:
    """Rows of several tokens: the first tokens of all rows go first, then the second ones, and so on."""

    starts: Tensor
    rows: Tensor
    """[tokens]: whose they are"""
    order: Tensor
    """[rows]: the longest first"""
    tokens: Tensor
    """[tokens]: in the order in which they go, those of one time in the order of their rows"""
    back: Tensor
    """[tokens]: where each went"""
    counts: tuple[int, ...]
    """How many go at each time."""
    _sources: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def sources(self, kernel: int) -> tuple[Tensor, Tensor]:
        """What a convolution takes for each token, [tokens, kernel], and what is left for the tokens to come, [rows,
        kernel - 1]: places among the inputs that rows had left, one row after another, and then those of all tokens."""
        if kernel not in self._sources:
            rows, tokens = (torch.arange(len(part), device=part.device) for part in (self.order, self.rows))
            taken = self._places(self.rows, tokens, kernel, kernel)
            self._sources[kernel] = taken, self._places(rows, self.starts[1:], kernel, kernel - 1)
        return self._sources[kernel]

    def _places(self, rows: Tensor, tokens: Tensor, kernel: int, count: int) -> Tensor:
        """The `count` places from `kernel` - 1 before each of the tokens on, which are in these rows."""
        left = kernel - 1
        at = tokens[:, None] + torch.arange(-left, count - left, device=rows.device)
        inside = at - self.starts[rows][:, None]
        return torch.where(inside < 0, rows[:, None] * left + inside + left, len(self.order) * left + at)


@dataclass(frozen=True, slots=True)
class StateBatch:
    """On the model's device, int64."""

    reads: Tensor
    """[rows, cells]; below 0: the row begins"""
    writes: Tensor
    fresh: Tensor | None
    """[rows]: which of them begin; None: none does"""
    extents: tuple[tuple[int, int], ...]
    """Each row's first token, and the one behind its last."""
    starts: Tensor
    """The same: where each row's tokens begin, and where the last one's end."""
    turns: Turns | None
    """None: every row is one token"""


def read_states(chunks: Sequence[Chunk], starts: Ints, cells: int, most: int) -> HostStates:
    """`chunks` in the order of the rows, `cells` those of a state. They must be below `most`."""
    reads = np.full((len(chunks), cells), -1, np.int32)
    writes = np.empty((len(chunks), cells), np.int32)
    for row, table in enumerate(chunk.state for chunk in chunks):
        if table is None or len(table.write) != cells or len(table.read) not in (0, cells):
            raise BackendError(f"a chunk of a model that carries a state does not say where, in {cells} cells")
        writes[row] = table.write
        if table.read:
            reads[row] = table.read
    known = reads[reads[:, 0] >= 0]
    for found in (known, writes):
        wrong = found[(found < 0) | (found >= most)]
        if len(wrong):
            raise BackendError(f"a chunk's state is in cell {wrong[0]}, but there are {most}")
    if len(np.unique(writes)) < writes.size or np.isin(known, writes).any():
        raise BackendError("a chunk's state would be written over one that the step needs")
    return HostStates(reads, writes, starts)


def states_on(host: HostStates, starts: Tensor, reads: Tensor, writes: Tensor) -> StateBatch:
    """All but `host` is on the device."""
    fresh = reads[:, 0] < 0 if host.begins else None
    sizes = np.diff(host.starts)
    extents = tuple(zip(host.starts[:-1].tolist(), host.starts[1:].tolist(), strict=True))
    turns = None if int(sizes.max(initial=1)) == 1 else _turns(host.starts, sizes, reads.device)
    return StateBatch(reads.long(), writes.long(), fresh, extents, starts, turns)


def _turns(starts: Ints, sizes: Ints, device: torch.device) -> Turns:
    rows = np.repeat(np.arange(len(sizes)), sizes)
    order = np.argsort(-sizes, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    times = np.arange(len(rows)) - np.repeat(starts[:-1], sizes)
    tokens = np.lexsort((rank[rows], times))
    back = np.empty_like(tokens)
    back[tokens] = np.arange(len(tokens))
    counts = tuple(np.bincount(times).tolist())

    def on_device(part: NDArray[Any]) -> Tensor:
        return torch.from_numpy(part.astype(np.int64)).to(device)

    return Turns(on_device(starts), on_device(rows), on_device(order), on_device(tokens), on_device(back), counts)
