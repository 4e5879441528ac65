"""The blocks of layers with a window that are apart from the others, as tables like those of the other layers: one for
each cell of a block, in which blocks have the numbers that they have in the text.

In front of the first block of a row, tables have that one: kernels may read there what no query sees, and what they
read must be numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cllm.backends.base import Chunk
from cllm.errors import BackendError
from cllm.kv.groups import KVGroup

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HostLocal:
    """On the host."""

    blocks: Ints
    """[blocks of all rows, cells of a block]"""
    begins: Ints
    """[rows + 1]: where each row's begin"""
    firsts: Ints
    """[rows]: the number of the first one in the text"""
    slots: Ints
    """[cells of a block, tokens]: where K and V of each token go"""

    @property
    def parts(self) -> tuple[Ints, ...]:
        return self.blocks, self.begins, self.firsts, self.slots


def read_local(
    chunks: Sequence[Chunk], positions: Ints, starts: Ints, size: int, group: KVGroup, most: int
) -> HostLocal:
    """`chunks` in the order of the rows, whose tokens are at these positions and begin where `starts` says. Cells must
    be below `most`."""
    tables = [chunk.local for chunk in chunks]
    lists, firsts = [], np.zeros(len(chunks), np.int32)
    for row, (chunk, table) in enumerate(zip(chunks, tables, strict=True)):
        if table is None:
            raise BackendError("a chunk does not say where the blocks of layers with a window are")
        needed, end = max(0, chunk.start - group.window + 1) // size, chunk.start + len(chunk.tokens)
        if table.first > needed or (table.first + len(table.cells) // group.cells) * size < end:
            raise BackendError(f"a chunk ends at position {end}, past the end of its blocks of layers with a window")
        lists.append(table.cells)
        firsts[row] = table.first
    counts = np.array([len(cells) for cells in lists], np.int32) // group.cells
    begins = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(counts, out=begins[1:])
    blocks = np.array([cell for cells in lists for cell in cells], np.int32).reshape(-1, group.cells)
    if int(blocks.min()) < 0 or int(blocks.max()) >= most:
        raise BackendError(f"a chunk's layers with a window name block {blocks.max()}, but there are {most}")
    at = np.repeat(begins[:-1] - firsts, np.diff(starts)) + positions // size
    slots = blocks[at] * size + (positions % size)[:, None]
    return HostLocal(blocks, begins, firsts, np.ascontiguousarray(slots.T))


def expand(blocks: Tensor, begins: Tensor, firsts: Tensor, most: int) -> Tensor:
    """Tables [cells of a block, rows, `most` blocks]. Rows have at least one block each."""
    first, last = begins[:-1, None], begins[1:, None] - 1
    numbers = torch.arange(most, device=blocks.device, dtype=torch.int32)
    at = (first - firsts[:, None] + numbers).clamp(first, last)
    return blocks[at.long()].permute(2, 0, 1).contiguous()
