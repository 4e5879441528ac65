"""The operations in plain torch: the reference for the kernels, and what runs where there is no GPU.

K and V lie in one tensor, [blocks, layers, 2, kv heads, block_size, head_dim], so that a block is one piece of memory.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import StepBatch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual` becomes x + residual; its norm is returned."""
    residual += x
    return rms_norm(residual, weight, eps)


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotate(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """`x` is [tokens, heads, head_dim], `rotations` [tokens, head_dim]: cosines, then sines."""
    cosines, sines = rotations.unsqueeze(1).chunk(2, dim=-1)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1).to(x.dtype)


def store(keys: torch.Tensor, values: torch.Tensor, arena: Arena, layer: int, slots: torch.Tensor) -> None:
    """`keys` and `values` are [tokens, kv heads, head_dim]."""
    kv, size = arena.data, arena.block_size
    blocks, places = slots.long() // size, slots.long() % size
    kv[blocks, layer, 0, :, places] = keys.to(kv.dtype)
    kv[blocks, layer, 1, :, places] = values.to(kv.dtype)


def attend(q: torch.Tensor, arena: Arena, layer: int, batch: StepBatch) -> torch.Tensor:
    """Every query, [tokens, heads, head_dim], over its sequence up to itself. Computed in float32."""
    out = torch.empty_like(q)
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    for row, length in enumerate(lengths):
        rows = slice(starts[row], starts[row + 1])
        out[rows] = _attend_one(q[rows], *_sequence(arena, layer, batch.tables[row], length)).to(q.dtype)
    return out


def _sequence(arena: Arena, layer: int, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a sequence, [kv heads, length, head_dim] each."""
    blocks = table[: -(-length // arena.block_size)].long()
    both = arena.data[blocks, layer].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return both[0], both[1]


def _attend_one(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    tokens, heads, head_dim = q.shape
    kv_heads, length, _ = keys.shape
    grouped = q.float().view(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = grouped @ keys.unsqueeze(1).transpose(-1, -2) * head_dim**-0.5
    positions = torch.arange(length, device=q.device)
    hidden = positions > positions[length - tokens :, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ values.unsqueeze(1)).permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)
