"""A decode step over a fixed number of rows, some of them unused: what a CUDA graph captures.

Its inputs go to the device in one copy, to a place that stays the same. For R rows:

 4 R of each   what is added to logits, as float64; and to which tokens'
 R of each     tokens, follows, positions, slots, lengths, owners
 R + 1 of each where each row's blocks begin in the list; where its biases begin
 groups        which rows share their beginnings, if any do (`shared_prefixes.py`)
 the list      blocks of all rows

The step begins with taking that apart: rows that follow get the tokens that the step before chose, and blocks come into
the table that attention reads. It ends with the best token of each row, if that is all that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import HostBatch, Ints, StepBatch
from cllm.backends.torch.model import Model
from cllm.backends.torch.sampling import HostDraws, Sampler, TokenBiases
from cllm.backends.torch.shared_prefixes import Groups, find_shared_in, packed_size, unpacked
from cllm.backends.torch.staging import ALIGNED_WORDS, aligned, upload

BIASES = 4
"""Biases that there is room for, for each row."""
_SECTIONS = 6
_LEAST_INPUTS = 1 << 16
"""So many numbers have room in the inputs: how tokens are chosen goes there, too, if it is not very much."""


class Loaded(NamedTuple):
    """A step's inputs besides its batch."""

    moved: list[Tensor]
    """The parts of its draws, if it does not choose itself."""
    chooses: bool
    wanted: Tensor | None
    """Rows whose logits are wanted; None: all."""


class PaddedStep:
    def __init__(
        self, model: Model, arena: Arena, last: Tensor, sampler: Sampler, *, blocks_per_row: int, rows: int
    ) -> None:
        """`last` has the last token of every row number. Unused rows write to the arena's first spare block."""
        self.longest = blocks_per_row * arena.block_size
        self._model = model
        self._arena = arena
        self._last = last
        self._sampler = sampler
        self._unused_slot = arena.blocks * arena.block_size
        ints = {"dtype": torch.int32, "device": arena.device}
        most = _table_at(rows) + rows * blocks_per_row
        self._inputs = torch.zeros(max(2 * most, _LEAST_INPUTS), **ints)
        self._tables = torch.zeros((rows, blocks_per_row), **ints)
        self._rows = torch.arange(rows + 1, **ints)

    @property
    def shares(self) -> bool:
        """Whether it matters which rows share their beginnings."""
        return self._model.shares

    def groups(self, batch: HostBatch, rows: int, longest: int) -> Groups | None:
        """Rows that share enough of their beginnings, for a step that is padded to `rows` and `longest`."""
        if not self._model.shares:
            return None
        size, longest = self._arena.block_size, min(longest, self.longest)
        return find_shared_in(batch.table, batch.firsts, batch.lengths, size, longest, rows=rows)

    def load(self, batch: HostBatch, draws: HostDraws | None, rows: int, groups: Groups | None = None) -> Loaded:
        """Fill the inputs. Rows choose their tokens themselves if `draws` ask for no more than they can do, of all."""
        simple = draws is not None and draws.simple and (draws.bias is None or len(draws.bias[0]) <= BIASES * rows)
        chooses = simple and batch.wants_all
        words = self._padded(batch, draws if chooses else None, rows)
        if groups is not None:
            groups.pack(words[_groups_at(rows) : _table_at(rows)])
        beside = [] if draws is None or chooses else draws.parts()
        if not batch.wants_all:
            beside = [batch.wanted, *beside]
        device = self._inputs.device
        needed = len(words) + sum(2 * part.size + ALIGNED_WORDS for part in (batch.table, *beside))
        if needed <= len(self._inputs):
            moved = upload([words, batch.table, *beside], device, self._inputs)[2:]
        else:
            upload([words, batch.table], device, self._inputs)
            moved = upload(beside, device)
        return Loaded(moved, chooses, None) if batch.wants_all else Loaded(moved[1:], chooses, moved[0])

    def load_nothing(self, rows: int) -> None:
        """Unused rows: nothing that they write matters."""
        nobody = np.zeros(0, np.int32)
        one = np.zeros(1, np.int32)
        batch = HostBatch(nobody, nobody, nobody, one, nobody, nobody, one, nobody, nobody, 0, 0, 0)
        upload([self._padded(batch, None, rows)], self._inputs.device, self._inputs)

    def compute(self, rows: int, longest: int, shared: bool = False) -> tuple[Tensor, Tensor]:
        """Logits, and the best token of each, for contexts up to `longest`; with groups, if there are any."""
        inputs = self._inputs
        values = inputs[: 2 * BIASES * rows].view(torch.float64)
        ids = inputs[2 * BIASES * rows : _sections_at(rows)]
        sections = inputs[_sections_at(rows) : _sections_at(rows) + _SECTIONS * rows].view(_SECTIONS, rows)
        tokens, follows, positions, slots, lengths, owners = sections
        firsts, starts = inputs[_groups_at(rows) - 2 * rows - 2 : _groups_at(rows)].view(2, rows + 1)
        groups = inputs[_groups_at(rows) :][: packed_size(rows)]
        tables, longest = self._tables[:rows], min(longest, self.longest)
        self._sampler.prepare(tokens, follows, self._last, inputs[_table_at(rows) :], firsts, tables)
        batch = StepBatch(
            *(tokens, positions, slots, self._rows[: rows + 1], lengths, tables, self._rows[:rows]),
            decode_rows=rows,
            longest_chunk=0,
            longest=longest,
            shared=unpacked(groups, rows, longest) if shared else None,
        )
        logits = self._model.forward(batch, self._arena)
        self._sampler.bias(logits, TokenBiases(ids, values, starts))
        return logits, self._sampler.choose(logits, None, owners, self._last)

    def _padded(self, batch: HostBatch, draws: HostDraws | None, rows: int) -> Ints:
        used = batch.decode_rows
        words = np.zeros(_table_at(rows), np.int32)
        at = _sections_at(rows)
        sections = words[at : at + _SECTIONS * rows].reshape(_SECTIONS, rows)
        owners = np.full(used, -1, np.int32) if draws is None else draws.owners
        parts = (batch.tokens, batch.follows, batch.positions, batch.slots, batch.lengths, owners)
        for section, part, unused in zip(sections, parts, (0, -1, 0, self._unused_slot, 1, -1), strict=True):
            section[:used] = part
            section[used:] = unused
        firsts, starts = words[at + _SECTIONS * rows : _groups_at(rows)].reshape(2, rows + 1)
        _fill(firsts, batch.firsts)
        if draws is not None and draws.bias is not None:
            ids, values, begins = draws.bias
            words[: 2 * len(values)].view(np.float64)[:] = values
            words[2 * BIASES * rows :][: len(ids)] = ids
            _fill(starts, begins)
        return words


def _sections_at(rows: int) -> int:
    return 3 * BIASES * rows


def _groups_at(rows: int) -> int:
    return _sections_at(rows) + _SECTIONS * rows + 2 * (rows + 1)


def _table_at(rows: int) -> int:
    return aligned(_groups_at(rows) + packed_size(rows))


def _fill(places: Ints, begins: Sequence[int] | Ints) -> None:
    """Where rows begin; those that are not used have nothing."""
    places[: len(begins)] = begins
    places[len(begins) :] = begins[-1]
