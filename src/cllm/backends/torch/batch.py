"""A step as tensors: rows of single tokens first, then prompt chunks, over one table of blocks.

tokens     5 | 9 | 2 8 4 7 1 | 6 3 …       rows 0 and 1 decode, row 2 is a chunk of five tokens, row 3 …
starts     0   1   2           7    …       where each row's tokens begin
lengths    positions of each row's sequence, this step's included
slots      where K and V of each token go: block * block_size + place in the block
follows    of each row whose last token it begins with, if that is not known yet; else -1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cllm.backends.base import Chunk
from cllm.backends.torch.sharing import SharedPrefixes
from cllm.backends.torch.staging import upload
from cllm.errors import BackendError

Ints = NDArray[np.int32]

ROW_NUMBERS = 1 << 16
"""Rows have numbers below this."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything is int32 and on the model's device."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    """[rows, blocks of the longest]"""
    wanted: torch.Tensor
    """Tokens whose logits are wanted, in the order of the chunks they end."""
    decode_rows: int
    longest_chunk: int
    """Tokens of the longest row that is not a decode row."""
    longest: int
    """Positions of the longest sequence."""
    shared: SharedPrefixes | None = None
    """Beginnings that decode rows have in common; each row's result is that without."""


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The same on the host, with the blocks of all rows in one list."""

    tokens: Ints
    positions: Ints
    slots: Ints
    starts: Ints
    lengths: Ints
    table: Ints
    firsts: Ints
    """Where each row's blocks begin in the list."""
    wanted: Ints
    follows: Ints
    decode_rows: int
    longest_chunk: int
    longest: int

    @property
    def decodes(self) -> bool:
        """Whether every row is one token whose logits are wanted; then they are in the order of the chunks."""
        return self.decode_rows == len(self.tokens) == len(self.wanted)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What there is: a chunk that names more is an error, never a write outside the arena."""

    tokens: int
    positions: int
    blocks: int


class Tables:
    """Lists of blocks as arrays. A row's array is brought up to date rather than made anew: comparing is quick."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[int], Ints]] = {}

    def of(self, chunk: Chunk, count: int) -> Ints:
        """The chunk's first blocks, valid until it is asked for the same row again."""
        blocks, row = chunk.blocks, chunk.row
        if row < 0:
            return np.array(blocks[:count], np.int32)
        listed, held = self._known.get(row, _NOTHING)
        if blocks != listed:
            same = len(listed) if blocks[: len(listed)] == listed else 0
            if len(blocks) > len(held):
                held = np.concatenate([held[:same], np.zeros(len(blocks) + 64 - same, np.int32)])
            held[same : len(blocks)] = blocks[same:]
            self._known[row] = blocks.copy(), held
        return held[:count]


_NOTHING: tuple[list[int], Ints] = ([], np.zeros(0, np.int32))


def order_of(chunks: Sequence[Chunk]) -> list[int]:
    """Single tokens before chunks, otherwise as they came."""
    return sorted(range(len(chunks)), key=lambda index: len(chunks[index].tokens) > 1)


def read_chunks(
    chunks: Sequence[Chunk], block_size: int, bounds: Bounds | None = None, tables: Tables | None = None
) -> HostBatch:
    """Raises `BackendError` for a chunk out of bounds."""
    tables = tables or Tables()
    order = order_of(chunks)
    rows = [chunks[index] for index in order]
    sizes = np.array([len(row.tokens) for row in rows], np.int32)
    decode_rows = int(np.count_nonzero(sizes == 1))
    starts = _running(sizes)
    begins = np.array([row.start for row in rows], np.int32)
    lengths = begins + sizes
    used = -(-lengths // block_size)
    if bounds is not None:
        _check_rows(rows, sizes, begins, used, bounds)
    if decode_rows == len(rows):
        tokens = np.array([row.tokens[0] for row in rows], np.int32)
        positions, row_of = begins, np.arange(len(rows))
    else:
        tokens = np.concatenate([np.frombuffer(row.tokens, np.int32) for row in rows])
        positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(begins - starts[:-1], sizes)
        row_of = np.repeat(np.arange(len(rows)), sizes)
    table = np.concatenate([tables.of(row, count) for row, count in zip(rows, used.tolist(), strict=True)])
    if bounds is not None:
        _check_range("token", tokens, bounds.tokens)
        _check_range("block", table, bounds.blocks)
    firsts = _running(used)
    slots = table[firsts[row_of] + positions // block_size] * block_size + positions % block_size
    follows = np.array([row.row if row.follows else -1 for row in rows], np.int32)
    return HostBatch(
        tokens=tokens,
        positions=positions,
        slots=slots.astype(np.int32, copy=False),
        starts=starts,
        lengths=lengths,
        table=table,
        firsts=firsts,
        wanted=_wanted(chunks, order, starts),
        follows=follows,
        decode_rows=decode_rows,
        longest_chunk=int(sizes[decode_rows:].max(initial=0)),
        longest=int(lengths.max()),
    )


Prepare = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    None,
]
"""Tokens, follows, last, table, firsts, tables: rows that follow get their tokens, and every row its blocks."""


def prepare_plainly(
    tokens: torch.Tensor,
    follows: torch.Tensor,
    last: torch.Tensor,
    table: torch.Tensor,
    firsts: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    places = (follows >= 0).nonzero().squeeze(1)
    tokens[places] = last[follows[places].long()]
    begins = firsts.tolist()
    for row, first, end in zip(tables, begins, begins[1:], strict=False):
        row[: end - first] = table[first:end]


def batch_on(host: HostBatch, device: torch.device, last: torch.Tensor, prepare: Prepare) -> StepBatch:
    """The batch on a device, in one transfer. Rows that follow take their tokens out of `last`."""
    parts = (host.tokens, host.positions, host.slots, host.starts, host.lengths, host.wanted)
    moved = upload([*parts, host.follows, host.table, host.firsts], device)
    tokens, positions, slots, starts, lengths, wanted, follows, table, firsts = moved
    most = int(np.diff(host.firsts).max())
    tables = torch.empty((len(host.lengths), most), dtype=torch.int32, device=device)
    prepare(tokens, follows, last, table, firsts, tables)
    return StepBatch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        starts=starts,
        lengths=lengths,
        tables=tables,
        wanted=wanted,
        decode_rows=host.decode_rows,
        longest_chunk=host.longest_chunk,
        longest=host.longest,
    )


def make_batch(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> StepBatch:
    """Of chunks whose tokens are all known."""
    last = torch.empty(0, dtype=torch.int32, device=device)
    return batch_on(read_chunks(chunks, block_size), device, last, prepare_plainly)


def _running(sizes: Ints) -> Ints:
    """Where each begins if they lie one after another, and where the last one ends."""
    places = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=places[1:])
    return places


def _wanted(chunks: Sequence[Chunk], order: list[int], starts: Ints) -> Ints:
    last_of = dict(zip(order, (starts[1:] - 1).tolist(), strict=True))
    return np.array([last_of[index] for index, chunk in enumerate(chunks) if chunk.wants_logits], np.int32)


def _check_rows(rows: Sequence[Chunk], sizes: Ints, begins: Ints, used: Ints, bounds: Bounds) -> None:
    if int(sizes.min()) < 1 or int(begins.min()) < 0:
        raise BackendError("a chunk has no tokens, or begins before position 0")
    ends = int((begins + sizes).max())
    if ends > bounds.positions:
        raise BackendError(f"a chunk ends at position {ends}, of {bounds.positions} there are")
    for row, count in zip(rows, used.tolist(), strict=True):
        if len(row.blocks) < count:
            raise BackendError(f"a chunk needs {count} blocks and has {len(row.blocks)}")
        if row.row >= ROW_NUMBERS or (row.follows and (row.row < 0 or len(row.tokens) != 1)):
            raise BackendError(f"a chunk of {len(row.tokens)} tokens has the row {row.row}, or follows on none")


def _check_range(what: str, values: Ints, count: int) -> None:
    least, most = int(values.min()), int(values.max())
    if least < 0 or most >= count:
        raise BackendError(f"a chunk names {what} {least if least < 0 else most}, of {count} there are")
