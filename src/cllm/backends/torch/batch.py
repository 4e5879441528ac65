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


def order_of(chunks: Sequence[Chunk]) -> list[int]:
    """Single tokens before chunks, otherwise as they came."""
    return sorted(range(len(chunks)), key=lambda index: len(chunks[index].tokens) > 1)


def make_batch(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> StepBatch:
    """One transfer: the parts are views of one tensor."""
    order = order_of(chunks)
    rows = [chunks[index] for index in order]
    sizes = np.array([len(row.tokens) for row in rows], np.int32)
    starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(sizes, out=starts[1:])
    firsts = np.array([row.start for row in rows], np.int32)
    tokens = np.concatenate([np.frombuffer(row.tokens, np.int32) for row in rows])
    positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(firsts - starts[:-1], sizes)
    lengths = firsts + sizes
    width = int(-(-int(lengths.max()) // block_size))
    tables = np.zeros((len(rows), width), np.int32)
    for table, row, length in zip(tables, rows, lengths, strict=True):
        used = -(-int(length) // block_size)
        table[:used] = row.blocks[:used]
    row_of = np.repeat(np.arange(len(rows)), sizes)
    slots = tables[row_of, positions // block_size] * block_size + positions % block_size
    last_of = {index: int(starts[place + 1]) - 1 for place, index in enumerate(order)}
    wanted = np.array([last_of[index] for index, chunk in enumerate(chunks) if chunk.wants_logits], np.int32)
    parts = (tokens, positions, slots.astype(np.int32), starts, lengths.astype(np.int32), tables.ravel(), wanted)
    moved = _to_device(parts, device)
    decode_rows = int(np.count_nonzero(sizes == 1))
    return StepBatch(
        *moved[:5],
        tables=moved[5].view(len(rows), width),
        wanted=moved[6],
        decode_rows=decode_rows,
        longest_chunk=int(sizes[decode_rows:].max(initial=0)),
        longest=int(lengths.max()),
    )


def _to_device(parts: Sequence[Ints], device: torch.device) -> tuple[torch.Tensor, ...]:
    together = torch.from_numpy(np.concatenate(parts))
    if device.type == "cuda":
        together = together.pin_memory().to(device, non_blocking=True)
    return together.split([len(part) for part in parts])
