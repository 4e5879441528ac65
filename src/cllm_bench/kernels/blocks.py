"""Streams on cLLM's engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm._native import Engine
from cllm.kv.groups import KVLayout
from cllm_bench.kernels.streams import Tokens

BLOCK = 16
KV_TYPE = "f16"
SPARE = 4
"""The arena is this many times as large as what is used, and the rest behind it: memory that nobody uses must not be
taken."""
_STATES = 3
"""A stream's state as it was filled, and two more, of which a step reads one and writes the other."""


class BlockStreams:
    """Streams over blocks in no order, as they lie after a while in a server."""

    def __init__(
        self,
        engine: Engine,
        n_vocab: int,
        streams: int,
        room: int,
        *,
        type_k: str = KV_TYPE,
        type_v: str = KV_TYPE,
        layout: KVLayout | None = None,
    ) -> None:
        """`layout`: of a model whose layers carry states."""
        self._engine = engine
        per_stream = -(-room // BLOCK)
        blocks = streams * per_stream
        state_cells, arrangement = _states_of(layout)
        used = blocks + streams * _STATES * state_cells
        engine.allocate(cells=SPARE * used, block_size=BLOCK, type_k=type_k, type_v=type_v, **arrangement)
        placed = np.random.default_rng(streams).permutation(used).astype(np.int32)
        self._tables = placed[:blocks].reshape(streams, per_stream)
        self._states = placed[blocks:].reshape(streams, _STATES, state_cells)
        self._kept, self._latest = 0, 0
        """Which of its states every stream goes back to, and which one it has."""
        self._n_vocab = n_vocab
        self._logits = np.empty((streams, n_vocab), np.float32)
        self.tokens_used = blocks * BLOCK

    def prompt(self, tokens: Tokens[int]) -> None:
        self._step(tokens, self._tables[:1], 0, len(tokens))
        self._kept = self._latest

    def share(self) -> None:
        first, others = self._cells(slice(0, 1)), self._cells(slice(1, None))
        if others.size:
            sources = np.broadcast_to(first, others.shape)
            self._engine.copy_blocks(np.stack([sources.ravel(), others.ravel()], axis=1))

    def decode(self, tokens: Tokens[int], position: int) -> None:
        """Fewer tokens than there are streams: the first ones."""
        self._step(tokens, self._tables[: len(tokens)], position, 1)

    def advance(self, tokens: Tokens[int], position: int) -> None:
        """One chunk, as a server sends a sequence with drafts."""
        self._step(tokens, self._tables[:1], position, len(tokens), wanted=len(tokens))

    def rewind(self, position: int) -> None:
        """What lies behind is written over; states go back to those of the prompt."""
        self._latest = self._kept

    def _cells(self, streams: slice) -> NDArray[np.int32]:
        """All that some streams hold after the prompt."""
        return np.concatenate([self._tables[streams], self._states[streams, self._kept]], axis=1)

    def _step(
        self, tokens: Tokens[int], tables: NDArray[np.int32], position: int, count: int, *, wanted: int = 1
    ) -> None:
        """`count` tokens of each of these streams; logits of the last `wanted` of them."""
        rows, blocks = len(tables) * wanted, -(-(position + count) // BLOCK)
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._n_vocab), np.float32)
        parts = [tables[:, :blocks]]
        columns = [count, position, wanted, blocks, 0, 0]
        if self._states.size:
            states = self._states[: len(tables)]
            read = states[:, self._latest, : None if position else 0]
            self._latest = next(free for free in range(_STATES) if free not in (self._kept, self._latest))
            write = states[:, self._latest]
            parts += [read, write]
            columns += [read.shape[1], write.shape[1]]
        chunks = np.empty((len(tables), len(columns)), np.int32)
        chunks[:] = columns
        table = np.concatenate(parts, axis=1).ravel()
        self._engine.step(np.frombuffer(tokens, np.int32), chunks, table, self._logits[:rows])


def _states_of(layout: KVLayout | None) -> tuple[int, dict[str, Any]]:
    """Cells of a state, and what the engine must know of them."""
    if layout is None or layout.states is None:
        return 0, {}
    states = layout.states
    return states.cells, {
        "cell_bytes": layout.cell_bytes,
        "groups": [(group.layers, group.cells) for group in layout.groups],
        "state_cells": states.cells,
        "states": list(zip(states.layers, states.places, strict=True)),
    }
