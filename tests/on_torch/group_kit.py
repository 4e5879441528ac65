"""Steps by hand through models whose layers differ: with tables of blocks for layers with a window, and with states.

Memory that is free holds bytes that are no number in any type, so that nobody reads it without notice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cllm.backends.base import Chunk
from cllm.kv.groups import LocalBlock, LocalTable, StateTable
from cllm.kv.ops import BlockGeometry
from step_of import rows_of

BLOCK = 16
CELLS = 400
NO_NUMBER = 255


class Held:
    """A sequence's memory, as the cache would hold it."""

    def __init__(self, blocks: list[int], state: LocalBlock | None = None, done: int = 0) -> None:
        self.blocks = blocks
        self.local = LocalTable(0)
        self.state = StateTable(state)
        self.done = done
        """Tokens that are computed."""


class GroupedSteps:
    """A backend with a layout of groups, whose cells are given out by hand."""

    def __init__(self, backend: Any, kv_type: str = "f32", *, apart: bool = True) -> None:
        self.backend = backend
        self.layout = backend.spec.kv_layout(kv_type, kv_type, BLOCK, apart=apart)
        backend.allocate(BlockGeometry(CELLS, BLOCK, self.layout))
        self.data = backend._worker.context.arena.data
        self.data.view(torch.uint8).fill_(NO_NUMBER)
        self.free = list(range(CELLS))[::-1]

    def begin(self, length: int) -> Held:
        return Held(self.take(-(-length // BLOCK)))

    def go_on(self, sequence: Held, length: int) -> Held:
        """A twin that has what is computed, which ends with a block, and room for a text of its own."""
        shared = sequence.blocks[: sequence.done // BLOCK]
        return Held(shared + self.take(-(-length // BLOCK) - len(shared)), sequence.state.current, sequence.done)

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def give_back(self, cells: Sequence[int]) -> None:
        self.data[list(cells)] = NO_NUMBER
        self.free[:0] = cells

    def run(self, tokens: Sequence[int], size: int) -> NDArray[np.float32]:
        """The logits of the last token of a text that is computed in chunks."""
        sequence = self.begin(len(tokens))
        for start in range(0, len(tokens), size):
            rows = self.step((sequence, tokens[start : start + size]))
        self.end(sequence)
        return rows[0]

    def end(self, sequence: Held) -> None:
        self.give_back(sequence.blocks)
        if sequence.state.current is not None:
            self.give_back(sequence.state.current.cells)
        for block in sequence.local.blocks:
            self.give_back(block.cells)

    def step(self, *parts: tuple[Held, Sequence[int]], keep: Sequence[LocalBlock | None] = ()) -> NDArray[np.float32]:
        """The logits of each one's last token. States in `keep` are snapshots: others are given back."""
        chunks = [self.chunk(sequence, tokens) for sequence, tokens in parts]
        rows = rows_of(self.backend, chunks).copy()
        for sequence, tokens in parts:
            sequence.done += len(tokens)
            table = sequence.state
            if table.next is not None:
                if table.current is not None and table.current not in keep:
                    self.give_back(table.current.cells)
                table.current, table.next = table.next, None
        return rows

    def chunk(self, sequence: Held, tokens: Sequence[int]) -> Chunk:
        local, state = None, None
        if self.layout.local is not None:
            local = self._slide(sequence, len(tokens))
        if self.layout.states is not None:
            state = sequence.state
            state.next = LocalBlock(self.take(self.layout.states.cells))
        return Chunk(array("i", tokens), sequence.done, True, blocks=sequence.blocks, local=local, state=state)

    def _slide(self, sequence: Held, count: int) -> LocalTable:
        """Free what is behind the window, and take what the tokens need."""
        group, table = self.layout.local, sequence.local
        assert group is not None
        first = max(0, sequence.done - group.window + 1) // BLOCK
        while table.blocks and table.first < first:
            self.give_back(table.blocks.pop(0).cells)
            table.first += 1
        table.refresh()
        while table.end * BLOCK < sequence.done + count:
            table.append(LocalBlock(self.take(group.cells)))
        return table
