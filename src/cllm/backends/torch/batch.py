"""A step as tensors: rows of single tokens first, then prompt chunks, over one table of blocks.

tokens     5 | 9 | 2 8 4 7 1 | 6 3 …       rows 0 and 1 decode, row 2 is a chunk of five tokens, row 3 …
starts     0   1   2           7    …       where each row's tokens begin
lengths    positions of each row's sequence, this step's included
slots      where K and V of each token go: block * block_size + place in the block
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cllm.backends.base import Chunk
from cllm.backends.torch.sharing import SharedPrefixes
from cllm.errors import BackendError

Ints = NDArray[np.int32]


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


def order_of(chunks: Sequence[Chunk]) -> list[int]:
    """Single tokens before chunks, otherwise as they came."""
    return sorted(range(len(chunks)), key=lambda index: len(chunks[index].tokens) > 1)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What there is: a chunk that names more is an error, never a write outside the arena."""

    tokens: int
    positions: int
    blocks: int


def make_batch(
    chunks: Sequence[Chunk], block_size: int, device: torch.device, bounds: Bounds | None = None
) -> StepBatch:
    """One transfer: the parts are views of one tensor. Raises `BackendError` for a chunk out of bounds."""
    order = order_of(chunks)
    rows = [chunks[index] for index in order]
    sizes = np.array([len(row.tokens) for row in rows], np.int32)
    starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(sizes, out=starts[1:])
    firsts = np.array([row.start for row in rows], np.int32)
    lengths = firsts + sizes
    used = -(-lengths // block_size)
    if bounds is not None:
        _check_rows(rows, sizes, firsts, used, bounds)
    tokens = np.concatenate([np.frombuffer(row.tokens, np.int32) for row in rows])
    positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(firsts - starts[:-1], sizes)
    tables = np.zeros((len(rows), int(used.max())), np.int32)
    for table, row, count in zip(tables, rows, used.tolist(), strict=True):
        table[:count] = row.blocks[:count]
    if bounds is not None:
        _check_range("token", tokens, bounds.tokens)
        _check_range("block", tables, bounds.blocks)
    row_of = np.repeat(np.arange(len(rows)), sizes)
    slots = tables[row_of, positions // block_size] * block_size + positions % block_size
    last_of = {index: int(starts[place + 1]) - 1 for place, index in enumerate(order)}
    wanted = np.array([last_of[index] for index, chunk in enumerate(chunks) if chunk.wants_logits], np.int32)
    parts = (tokens, positions, slots.astype(np.int32), starts, lengths, tables.ravel(), wanted)
    moved = _to_device(parts, device)
    decode_rows = int(np.count_nonzero(sizes == 1))
    return StepBatch(
        tokens=moved[0],
        positions=moved[1],
        slots=moved[2],
        starts=moved[3],
        lengths=moved[4],
        tables=moved[5].view(tables.shape),
        wanted=moved[6],
        decode_rows=decode_rows,
        longest_chunk=int(sizes[decode_rows:].max(initial=0)),
        longest=int(lengths.max()),
    )


def _check_rows(rows: Sequence[Chunk], sizes: Ints, firsts: Ints, used: Ints, bounds: Bounds) -> None:
    if int(sizes.min()) < 1 or int(firsts.min()) < 0:
        raise BackendError("a chunk has no tokens, or begins before position 0")
    if int((firsts + sizes).max()) > bounds.positions:
        raise BackendError(f"a chunk ends at position {int((firsts + sizes).max())}, of {bounds.positions} there are")
    for row, count in zip(rows, used.tolist(), strict=True):
        if len(row.blocks) < count:
            raise BackendError(f"a chunk needs {count} blocks and has {len(row.blocks)}")


def _check_range(what: str, values: Ints, count: int) -> None:
    least, most = int(values.min()), int(values.max())
    if least < 0 or most >= count:
        raise BackendError(f"a chunk names {what} {least if least < 0 else most}, of {count} there are")


def _to_device(parts: Sequence[Ints], device: torch.device) -> Sequence[torch.Tensor]:
    together = torch.from_numpy(np.concatenate(parts))
    if device.type == "cuda":
        together = together.pin_memory().to(device, non_blocking=True)
    pieces: Sequence[torch.Tensor] = together.split([len(part) for part in parts])
    return pieces
