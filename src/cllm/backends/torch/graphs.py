"""Decode steps as CUDA graphs: one launch instead of some hundred, for each padded number of rows and each context."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import StepBatch
from cllm.backends.torch.model import Model

ROWS = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32))
LENGTHS = (1024, 4096, 1 << 30)
"""Graphs are made for contexts up to these: what is launched for positions that nobody has still costs a little."""


class DecodeGraphs:
    """Graphs are made when they are first needed; all share one memory pool and one set of inputs."""

    def __init__(self, model: Model, arena: Arena, blocks_per_row: int) -> None:
        self._model = model
        self._arena = arena
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._longest = blocks_per_row * arena.block_size
        most, device = ROWS[-1], arena.device
        ints = {"dtype": torch.int32, "device": device}
        self._tokens = torch.zeros(most, **ints)
        self._positions = torch.zeros(most, **ints)
        # Rows that are not used write into a block that belongs to nobody.
        self._unused_slot = arena.spare_block * arena.block_size
        self._slots = torch.full((most,), self._unused_slot, **ints)
        self._lengths = torch.zeros(most, **ints)
        self._tables = torch.zeros((most, blocks_per_row), **ints)
        self._rows = torch.arange(most + 1, **ints)

    def fits(self, batch: StepBatch) -> bool:
        rows = batch.decode_rows
        return (
            rows == len(batch.tokens) == len(batch.wanted) and 0 < rows <= ROWS[-1] and batch.longest <= self._longest
        )

    def run(self, batch: StepBatch) -> torch.Tensor:
        rows = batch.decode_rows
        self._take(batch)
        key = _at_least(ROWS, rows), _at_least(LENGTHS, batch.longest)
        made = self._graphs.get(key)
        if made is None:
            made = self._graphs[key] = self._capture(*key)
        graph, logits = made
        graph.replay()
        return logits[:rows]

    def _take(self, batch: StepBatch) -> None:
        rows = batch.decode_rows
        self._tokens[:rows] = batch.tokens
        self._positions[:rows] = batch.positions
        self._slots[:rows] = batch.slots
        self._slots[rows:] = self._unused_slot
        self._lengths[:rows] = batch.lengths
        self._lengths[rows:] = 0
        self._tables[:rows, : batch.tables.shape[1]] = batch.tables

    def _capture(self, rows: int, longest: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        batch = StepBatch(
            *(self._tokens[:rows], self._positions[:rows], self._slots[:rows], self._rows[: rows + 1]),
            *(self._lengths[:rows], self._tables[:rows], self._rows[:rows]),
            decode_rows=rows,
            longest_chunk=0,
            longest=min(longest, self._longest),
        )
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and libraries set up outside the capture
            self._model.forward(batch, self._arena)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._model.forward(batch, self._arena)
        return graph, logits


def _at_least(sizes: Sequence[int], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
