"""Streams on cLLM's engine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cllm._native import Engine
from cllm_bench.kernels.streams import Tokens

BLOCK = 16
KV_TYPE = "f16"
SPARE = 4
"""The arena is this many times as large as what is used, and the rest behind it: memory that nobody uses must not be
taken."""


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
    ) -> None:
        self._engine = engine
        per_stream = -(-room // BLOCK)
        used = streams * per_stream
        engine.allocate(cells=SPARE * used, block_size=BLOCK, type_k=type_k, type_v=type_v)
        placed = np.random.default_rng(streams).permutation(used).astype(np.int32)
        self._tables = placed.reshape(streams, per_stream)
        self._n_vocab = n_vocab
        self._logits = np.empty((streams, n_vocab), np.float32)
        self.tokens_used = used * BLOCK

    def prompt(self, tokens: Tokens[int]) -> None:
        self._step(tokens, self._tables[:1], 0, len(tokens))

    def share(self) -> None:
        others = self._tables[1:]
        if others.size:
            sources = np.broadcast_to(self._tables[0], others.shape)
            self._engine.copy_blocks(np.stack([sources.ravel(), others.ravel()], axis=1))

    def decode(self, tokens: Tokens[int], position: int) -> None:
        """Fewer tokens than there are streams: the first ones."""
        self._step(tokens, self._tables[: len(tokens)], position, 1)

    def advance(self, tokens: Tokens[int], position: int) -> None:
        """One chunk, as a server sends a sequence with drafts."""
        self._step(tokens, self._tables[:1], position, len(tokens), wanted=len(tokens))

    def rewind(self, position: int) -> None:
        """What lies behind is written over."""

    def _step(
        self, tokens: Tokens[int], tables: NDArray[np.int32], position: int, count: int, *, wanted: int = 1
    ) -> None:
        """`count` tokens of each of these streams; logits of the last `wanted` of them."""
        rows, blocks = len(tables) * wanted, -(-(position + count) // BLOCK)
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._n_vocab), np.float32)
        chunks = np.empty((len(tables), 6), np.int32)
        chunks[:] = (count, position, wanted, blocks, 0, 0)
        table = np.ascontiguousarray(tables[:, :blocks]).ravel()
        self._engine.step(np.frombuffer(tokens, np.int32), chunks, table, self._logits[:rows])
