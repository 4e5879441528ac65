"""A step as tensors: rows of single tokens first, then prompt chunks, over one table of blocks.

tokens     5 | 9 | 2 8 4 7 1 | 6 3 …       rows 0 and 1 decode, row 2 is a chunk of five tokens, row 3 …
starts     0   1   2           7    …       where each row's tokens begin
lengths    positions of each row's sequence, this step's included
slots      where K and V of each token go: block * block_size + place in the block
follows    of each row whose last token it begins with, if that is not known yet; else -1
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cllm.backends.base import Chunk
from cllm.backends.torch.local_batch import HostLocal, expand, read_local
from cllm.backends.torch.shared_prefixes import SharedPrefixes
from cllm.backends.torch.staging import Numbers, upload
from cllm.backends.torch.state_batch import HostStates, StateBatch, read_states, states_on
from cllm.errors import BackendError
from cllm.kv.groups import KVLayout

Ints = NDArray[np.int32]

_MOST_CELLS = 1 << 31
ROW_NUMBERS = 1 << 16
"""Rows have numbers below this."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything is int32 and on the model's device."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    """[rows, blocks of the longest]"""
    wanted: Tensor
    """Tokens whose logits are wanted, in the order of the chunks they end."""
    decode_rows: int
    longest_chunk: int
    """Tokens of the longest row that is not a decode row."""
    longest: int
    """Positions of the longest sequence."""
    shared: SharedPrefixes | None = None
    """Beginnings that decode rows have in common; each row's result is that without."""
    states: StateBatch | None = None
    """None: no layer carries one."""
    local: tuple[StepBatch, ...] = ()
    """The same for layers whose blocks are apart, by which cell of a block they are in."""

    def over(self, table: int) -> StepBatch:
        """For layers whose blocks are where this table says."""
        return self if table == 0 else self.local[table - 1]


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
    states: HostStates | None = None
    local: HostLocal | None = None

    @property
    def decodes(self) -> bool:
        """Whether every row is one token; then they are in the order of the chunks."""
        return self.decode_rows == len(self.tokens)

    @property
    def wants_all(self) -> bool:
        """Whether the logits of all tokens are wanted."""
        return len(self.wanted) == len(self.tokens)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What there is: a chunk that names more is an error, never a write outside the arena."""

    tokens: int
    positions: int
    blocks: int


def _running(sizes: Ints) -> Ints:
    """Where each begins if they lie one after another, and where the last one ends."""
    places = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=places[1:])
    return places


_EMPTY: Ints = np.zeros(0, np.int32)
_NOTHING: tuple[list[int], Ints] = ([], _EMPTY)


class Tables:
    """Lists of blocks as arrays, which are brought up to date rather than made anew: comparing lists is quick."""

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: the most blocks of a list that matter."""
        self._limit = limit
        self._known: dict[int, tuple[list[int], Ints]] = {}
        self._rows: tuple[int, ...] = ()
        self._lists: tuple[list[int], ...] = ()
        self._together: tuple[Ints, Ints] = _EMPTY, _running(_EMPTY)

    def of(self, row: int, blocks: list[int]) -> Ints:
        """A row's blocks, valid until it is asked for the same row again; -1 is nobody's row."""
        if row < 0:
            return np.array(blocks[: self._limit], np.int32)
        listed, held = self._known.get(row, _NOTHING)
        if blocks != listed:
            same = len(listed) if blocks[: len(listed)] == listed else 0
            if len(blocks) > len(held):
                held = np.concatenate([held[:same], np.zeros(len(blocks) + 64 - same, np.int32)])
            held[same : len(blocks)] = blocks[same:]
            self._known[row] = blocks.copy(), held
        return held[: min(len(blocks), self._limit or len(blocks))]

    def of_all(self, rows: tuple[int, ...], lists: tuple[list[int], ...], most: int | None) -> tuple[Ints, Ints]:
        """The blocks of all, one after another, and where each row's begin. They must be below `most`."""
        if rows == self._rows and lists == self._lists:
            return self._together
        self._rows = ()
        parts = [self.of(row, blocks) for row, blocks in zip(rows, lists, strict=True)]
        table = np.concatenate(parts)
        if most is not None and len(table):
            _check_range("block", table, most)
        self._together = table, _running(np.array([len(part) for part in parts], np.int32))
        if -1 not in rows:
            self._lists = tuple([self._known.get(row, _NOTHING)[0] for row in rows])
            self._rows = rows
        return self._together


def spread(chunks: Sequence[Chunk], most_rows: int, most_positions: int) -> Sequence[Chunk]:
    """Short chunks as rows of single tokens, which read what the rows before them write in the same step. All stay as
    they are if that makes more than `most_rows`, or if the new rows attend to more than `most_positions` in all."""
    new = [chunk for chunk in chunks if len(chunk.tokens) > 1]
    rows = len(chunks) + sum(len(chunk.tokens) - 1 for chunk in new)
    positions = sum(len(chunk.tokens) * (chunk.start + len(chunk.tokens)) for chunk in new)
    if not new or rows > most_rows or positions > most_positions:
        return chunks
    return [row for chunk in chunks for row in (_single_tokens(chunk) if len(chunk.tokens) > 1 else (chunk,))]


def _single_tokens(chunk: Chunk) -> Iterator[Chunk]:
    last = len(chunk.tokens) - 1
    for place in range(last):
        token = chunk.tokens[place : place + 1]
        yield Chunk(token, chunk.start + place, 0, blocks=chunk.blocks, row=chunk.row, local=chunk.local)
    yield Chunk(
        chunk.tokens[last:],
        chunk.start + last,
        chunk.wanted_logits,
        blocks=chunk.blocks,
        row=chunk.row,
        local=chunk.local,
        draws=chunk.draws,
    )


def read_chunks(
    chunks: Sequence[Chunk],
    block_size: int,
    bounds: Bounds | None = None,
    tables: Tables | None = None,
    layout: KVLayout | None = None,
) -> HostBatch:
    """Raises `BackendError` for a chunk out of bounds."""
    rows = _rows_of(chunks)
    order = None
    if rows.decode_rows < len(chunks):  # single tokens come first
        order = sorted(range(len(chunks)), key=lambda index: len(chunks[index].tokens) > 1)
        rows = _rows_of([chunks[index] for index in order])
    if bounds is not None:
        _check_rows(rows, bounds)
    table, firsts = (tables or Tables()).of_all(rows.numbers, rows.lists, None if bounds is None else bounds.blocks)
    lengths = rows.begins + rows.sizes
    short = np.flatnonzero(np.diff(firsts) * block_size < lengths)
    if len(short):
        raise BackendError(f"a chunk ends at position {lengths[short[0]]}, past the end of its blocks")
    starts = _running(rows.sizes)
    if order is None:
        tokens, positions, begins = rows.first_tokens(), rows.begins, firsts[:-1]
    else:
        tokens = np.concatenate([np.frombuffer(each, np.int32) for each in rows.tokens])
        positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(rows.begins - starts[:-1], rows.sizes)
        begins = np.repeat(firsts[:-1], rows.sizes)
    if bounds is not None:
        _check_range("token", tokens, bounds.tokens)
    states = local = None
    if layout is not None and (layout.states is not None or layout.local is not None):
        ordered = chunks if order is None else [chunks[index] for index in order]
        most = _MOST_CELLS if bounds is None else bounds.blocks
        if layout.states is not None:
            states = read_states(ordered, starts, layout.states.cells, most)
        if layout.local is not None:
            local = read_local(ordered, positions, starts, block_size, layout.local, most)
    slots = table[begins + positions // block_size] * block_size + positions % block_size
    return HostBatch(
        tokens=tokens,
        positions=positions,
        slots=slots.astype(np.int32, copy=False),
        starts=starts,
        lengths=lengths,
        table=table,
        firsts=firsts,
        wanted=_wanted(chunks, order, starts),
        follows=rows.follows(),
        decode_rows=rows.decode_rows,
        longest_chunk=int(rows.sizes[rows.decode_rows :].max(initial=0)),
        longest=int(lengths.max()),
        states=states,
        local=local,
    )


_FIELDS = attrgetter("tokens", "start", "blocks", "row", "follows")


@dataclass(frozen=True, slots=True)
class _Rows:
    """Chunks field by field: for hundreds of rows that is several times as quick as chunk by chunk."""

    tokens: tuple[array[int], ...]
    begins: Ints
    sizes: Ints
    lists: tuple[list[int], ...]
    numbers: tuple[int, ...]
    following: tuple[bool, ...]
    decode_rows: int

    def follows(self) -> Ints:
        if False not in self.following:
            return np.array(self.numbers, np.int32)
        if True not in self.following:
            return np.full(len(self.numbers), -1, np.int32)
        return np.where(self.following, self.numbers, -1).astype(np.int32)

    def first_tokens(self) -> Ints:
        if False not in self.following:
            return np.zeros(len(self.tokens), np.int32)  # none of them is known
        return np.array([tokens[0] for tokens in self.tokens], np.int32)


def _rows_of(chunks: Sequence[Chunk]) -> _Rows:
    tokens, starts, lists, numbers, following = zip(*map(_FIELDS, chunks), strict=True)
    counts = list(map(len, tokens))
    sizes, begins = np.array(counts, np.int32), np.array(starts, np.int32)
    return _Rows(tokens, begins, sizes, lists, numbers, following, counts.count(1))


Prepare = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Tokens, follows, last, table, firsts, tables: rows that follow get their tokens, and every row its blocks."""


def plain_prepare(tokens: Tensor, follows: Tensor, last: Tensor, table: Tensor, firsts: Tensor, tables: Tensor) -> None:
    places = (follows >= 0).nonzero().squeeze(1)
    tokens[places] = last[follows[places].long()]
    begins = firsts.tolist()
    for row, first, end in zip(tables, begins, begins[1:], strict=False):
        row[: end - first] = table[first:end]


def batch_on(
    host: HostBatch, device: torch.device, last: Tensor, prepare: Prepare, beside: Sequence[Numbers] = ()
) -> tuple[StepBatch, list[Tensor]]:
    """The batch on a device, and what goes there beside it, in one transfer. Rows that follow take their tokens out of
    `last`."""
    parts = (host.tokens, host.positions, host.slots, host.starts, host.lengths, host.wanted)
    own = () if host.states is None else (host.states.reads, host.states.writes)
    local = () if host.local is None else host.local.parts
    moved = upload([*parts, host.follows, host.table, host.firsts, *own, *local, *beside], device)
    tokens, positions, slots, starts, lengths, wanted, follows, table, firsts = moved[:9]
    most = int(np.diff(host.firsts).max())
    tables = torch.empty((len(host.lengths), most), dtype=torch.int32, device=device)
    prepare(tokens, follows, last, table, firsts, tables)
    batch = StepBatch(
        *(tokens, positions, slots, starts, lengths, tables, wanted),
        decode_rows=host.decode_rows,
        longest_chunk=host.longest_chunk,
        longest=host.longest,
        states=None if host.states is None else states_on(host.states, starts, *moved[9:11]),
    )
    behind = 9 + len(own) + len(local)
    if local:
        blocks, begins, firsts, slots = moved[behind - 4 : behind]
        batch = with_local(batch, slots, expand(blocks, begins, firsts, most))
    return batch, moved[behind:]


def with_local(batch: StepBatch, slots: Tensor, tables: Tensor) -> StepBatch:
    """`slots` and `tables` are those of each cell of a block."""
    parts = zip(slots, tables, strict=True)
    return replace(batch, local=tuple(replace(batch, slots=own, tables=table) for own, table in parts))


def make_batch(
    chunks: Sequence[Chunk], block_size: int, device: torch.device, layout: KVLayout | None = None
) -> StepBatch:
    """For chunks whose tokens are all known."""
    last = torch.empty(0, dtype=torch.int32, device=device)
    return batch_on(read_chunks(chunks, block_size, layout=layout), device, last, plain_prepare)[0]


def _wanted(chunks: Sequence[Chunk], order: list[int] | None, starts: Ints) -> Ints:
    """Which tokens' logits, in the order of the chunks."""
    wants = [chunk.wanted_logits > 0 for chunk in chunks]
    if order is None:
        return np.arange(len(chunks), dtype=np.int32) if False not in wants else np.flatnonzero(wants).astype(np.int32)
    last_of = np.empty(len(order), np.int32)
    last_of[order] = starts[1:] - 1
    return last_of[wants]


def _check_rows(rows: _Rows, bounds: Bounds) -> None:
    if int(rows.sizes.min()) < 1 or int(rows.begins.min()) < 0:
        raise BackendError("a chunk has no tokens, or begins before position 0")
    end = int((rows.begins + rows.sizes).max())
    if end > bounds.positions:
        raise BackendError(f"a chunk ends at position {end}, but there are {bounds.positions}")
    if max(rows.numbers) >= ROW_NUMBERS:
        raise BackendError(f"a chunk has the row {max(rows.numbers)}, but there are {ROW_NUMBERS}")
    if True in rows.following[rows.decode_rows :]:
        raise BackendError("a chunk of several tokens follows on a token")
    if min(rows.numbers) < 0 and any(each and row < 0 for each, row in zip(rows.following, rows.numbers, strict=True)):
        raise BackendError("a chunk without a row follows on a token")


def _check_range(what: str, values: Ints, count: int) -> None:
    least, most = int(values.min()), int(values.max())
    if least < 0 or most >= count:
        raise BackendError(f"a chunk names {what} {least if least < 0 else most}, but there are {count}")
