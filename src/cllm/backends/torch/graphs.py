"""Decode steps as CUDA graphs: one launch instead of some hundred, for each padded number of rows and each context.

A step's inputs go to the device in one copy, to a place that all graphs know:

 R of each   tokens, follows, positions, slots, lengths
 R + 1       where each row's blocks begin in the list
 if shared   which rows share their beginning (sharing.py)
 the list    blocks of all rows

A graph begins with taking that apart: rows that follow get the tokens that the step before chose, and blocks come into
the table that attention reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import HostBatch, Ints, Prepare, StepBatch
from cllm.backends.torch.model import Model
from cllm.backends.torch.sharing import (
    FEWEST_ROWS,
    TOGETHER,
    Groups,
    SharedPrefixes,
    find_shared_in,
    most_tiles,
    shared_split,
)
from cllm.backends.torch.staging import upload

LENGTHS = (1024, 4096, 1 << 30)
"""Graphs are made for contexts up to these: what is launched for positions that nobody has still costs a little."""
_SECTIONS = 5

Key = tuple[int, int, bool]
"""Rows, context, and whether rows share beginnings."""


def row_counts(most: int) -> list[int]:
    """Numbers of rows that graphs are made for: few at the beginning, then about a tenth apart."""
    counts = [1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, max(most, 320) + 64, 64)]
    return [count for count in counts if count < most] + [most]


class DecodeGraphs:
    """All graphs share one memory pool and one set of inputs."""

    def __init__(
        self,
        model: Model,
        arena: Arena,
        last: torch.Tensor,
        prepare: Prepare,
        *,
        blocks_per_row: int,
        rows: int,
    ) -> None:
        """`last` has the last token of every row number. Unused rows write to the arena's spare block."""
        self._model = model
        self._arena = arena
        self._last = last
        self._prepare = prepare
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._longest = blocks_per_row * arena.block_size
        self._counts = row_counts(rows)
        self._unused_slot = arena.spare_block * arena.block_size
        ints = {"dtype": torch.int32, "device": arena.device}
        self._inputs = torch.zeros((_SECTIONS + 1) * rows + 1 + _shared_size(rows) + rows * blocks_per_row, **ints)
        self._tables = torch.zeros((rows, blocks_per_row), **ints)
        self._rows = torch.arange(rows + 1, **ints)

    def __len__(self) -> int:
        return len(self._graphs)

    def fits(self, batch: HostBatch) -> bool:
        return batch.decodes and batch.decode_rows <= self._counts[-1] and batch.longest <= self._longest

    def run(self, batch: HostBatch) -> torch.Tensor:
        """Logits of each row, valid until the next step."""
        rows, longest = _at_least(self._counts, batch.decode_rows), _at_least(LENGTHS, batch.longest)
        shared = self._find_shared(batch, rows, longest) if self._model.shares else None
        graph, logits = self._make((rows, longest, shared is not None))
        groups = [] if shared is None else [shared.members.ravel(), shared.extents, shared.firsts]
        upload([self._padded(batch, rows), *groups, batch.table], self._inputs.device, self._inputs)
        graph.replay()
        return logits[: batch.decode_rows]

    def make_all(self) -> None:
        """Make every graph that a step may need."""
        for key in self._keys():
            self._make(key)

    def make_largest(self) -> None:
        """Make the one that takes the most memory, which the others share with it."""
        self._make(self._keys()[0])

    def _keys(self) -> list[Key]:
        lengths = [length for length in LENGTHS if length <= _at_least(LENGTHS, self._longest)]
        kinds = (True, False) if self._model.shares else (False,)
        keys = itertools.product(reversed(lengths), reversed(self._counts), kinds)
        return [(rows, length, shared) for length, rows, shared in keys if rows >= FEWEST_ROWS or not shared]

    def _find_shared(self, batch: HostBatch, rows: int, longest: int) -> Groups | None:
        return find_shared_in(
            *(batch.table, batch.firsts, batch.lengths, self._arena.block_size, min(longest, self._longest)),
            rows=rows,
            tiles=most_tiles(rows),
        )

    def _padded(self, batch: HostBatch, rows: int) -> Ints:
        used = batch.decode_rows
        inputs = np.empty((_SECTIONS + 1) * rows + 1, np.int32)
        sections = inputs[: _SECTIONS * rows].reshape(_SECTIONS, rows)
        parts = (batch.tokens, batch.follows, batch.positions, batch.slots, batch.lengths)
        for section, part, unused in zip(sections, parts, (0, -1, 0, self._unused_slot, 0), strict=True):
            section[:used] = part
            section[used:] = unused
        firsts = inputs[_SECTIONS * rows :]
        firsts[: used + 1] = batch.firsts
        firsts[used + 1 :] = batch.firsts[-1]
        return inputs

    def _make(self, key: Key) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        made = self._graphs.get(key)
        if made is None:
            made = self._graphs[key] = self._capture(*key)
        return made

    def _capture(self, rows: int, longest: int, shared: bool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        # Nobody's rows: the step that is tried out below writes nothing that matters.
        unused = np.array([0, -1, 0, self._unused_slot, 1], np.int32).repeat(rows)
        nobody = np.zeros(rows + 1 + (_shared_size(rows) if shared else 0), np.int32)
        upload([unused, nobody], self._inputs.device, self._inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and libraries set up outside the capture
            self._forward(rows, longest, shared)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._forward(rows, longest, shared)
        return graph, logits

    def _forward(self, rows: int, longest: int, shared: bool) -> torch.Tensor:
        tokens, follows, positions, slots, lengths = self._inputs[: _SECTIONS * rows].view(_SECTIONS, rows)
        firsts = self._inputs[_SECTIONS * rows : (_SECTIONS + 1) * rows + 1]
        tables, longest = self._tables[:rows], min(longest, self._longest)
        rest = self._inputs[(_SECTIONS + 1) * rows + 1 :]
        groups, table = rest.tensor_split([_shared_size(rows) if shared else 0])
        self._prepare(tokens, follows, self._last, table, firsts, tables)
        batch = StepBatch(
            *(tokens, positions, slots, self._rows[: rows + 1], lengths, tables, self._rows[:rows]),
            decode_rows=rows,
            longest_chunk=0,
            longest=longest,
            shared=_shared_of(groups, rows, longest) if shared else None,
        )
        return self._model.forward(batch, self._arena)


def _shared_size(rows: int) -> int:
    return most_tiles(rows) * (TOGETHER + 1) + rows


def _shared_of(groups: torch.Tensor, rows: int, longest: int) -> SharedPrefixes:
    tiles = most_tiles(rows)
    members, extents, firsts = groups.split([tiles * TOGETHER, tiles, rows])
    return SharedPrefixes(members.view(tiles, TOGETHER), extents, firsts, shared_split(longest))


def _at_least(sizes: Sequence[int], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
