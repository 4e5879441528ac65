"""Decode steps as CUDA graphs: one launch instead of some hundred, for each padded number of rows and each context."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from cllm.backends.torch.batch import HostBatch
from cllm.backends.torch.padded_step import PaddedStep
from cllm.backends.torch.sampling import HostDraws
from cllm.backends.torch.shared_prefixes import FEWEST_ROWS

LENGTHS = (1024, 4096, 1 << 30)
"""Graphs are made for contexts up to these lengths: launching for unused positions still costs a little."""

Key = tuple[int, int, bool]
"""Rows, context, and whether rows share their beginnings."""


class Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    tokens: Tensor


class Ran(NamedTuple):
    """What a step gives, on the device; valid until the next one."""

    logits: Tensor
    tokens: Tensor | None
    """What it chose, if it did."""
    moved: list[Tensor]
    """If it did not: the parts of its draws."""


def row_counts(most: int) -> list[int]:
    """Numbers of rows that graphs are made for: few at the beginning, then about a tenth apart."""
    counts = [1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, max(most, 320) + 64, 64)]
    return [count for count in counts if count < most] + [most]


class DecodeGraphs:
    """All graphs share one memory pool and one step's inputs."""

    def __init__(self, step: PaddedStep, rows: int) -> None:
        self._step = step
        self._graphs: dict[Key, Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._counts = row_counts(rows)

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def most_rows(self) -> int:
        return self._counts[-1]

    def fits(self, batch: HostBatch) -> bool:
        return batch.decodes and batch.decode_rows <= self.most_rows and batch.longest <= self._step.longest

    def run(self, batch: HostBatch, draws: HostDraws | None) -> Ran:
        rows, longest = _at_least(self._counts, batch.decode_rows), _at_least(LENGTHS, batch.longest)
        groups = self._step.groups(batch, rows, longest)
        made = self._make((rows, longest, groups is not None))
        loaded = self._step.load(batch, draws, rows, groups)
        made.graph.replay()
        used = batch.decode_rows
        if loaded.wanted is not None:
            return Ran(made.logits[loaded.wanted.long()], None, loaded.moved)
        return Ran(made.logits[:used], made.tokens[:used] if loaded.chooses else None, loaded.moved)

    def make_all(self) -> None:
        """Make every graph that a step may need."""
        for key in self._keys():
            self._make(key)

    def make_largest(self) -> None:
        """Make the one that takes the most memory, which the others share with it."""
        self._make(self._keys()[0])

    def _keys(self) -> list[Key]:
        lengths = [length for length in LENGTHS if length <= _at_least(LENGTHS, self._step.longest)]
        kinds = (True, False) if self._step.shares else (False,)
        keys = itertools.product(reversed(lengths), reversed(self._counts), kinds)
        return [(rows, length, shared) for length, rows, shared in keys if rows >= FEWEST_ROWS or not shared]

    def _make(self, key: Key) -> Graph:
        made = self._graphs.get(key)
        if made is None:
            made = self._graphs[key] = self._capture(*key)
        return made

    def _capture(self, rows: int, longest: int, shared: bool) -> Graph:
        step, graph = self._step, torch.cuda.CUDAGraph()
        step.load_nothing(rows)
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            step.compute(rows, longest, shared)  # kernels are compiled and libraries set up outside the capture
            torch.cuda.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                logits, tokens = step.compute(rows, longest, shared)
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return Graph(graph, logits, tokens)


def _at_least(sizes: Sequence[int], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
