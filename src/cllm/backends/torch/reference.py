"""The operations in plain torch: the reference for the kernels, and what runs where there is no GPU.

Computed in float32, or in float64 if the inputs are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import StepBatch
from cllm.backends.torch.linear import FP8, FP8_LARGEST

INT8_LARGEST = 127.0


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual` becomes x + residual; its norm is returned."""
    residual += x
    return rms_norm(residual, weight, eps)


def silu_multiply(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """`x` is [tokens, heads, head_dim], `rotations` [tokens, head_dim]: cosines, then sines."""
    cosines, sines = rotations.unsqueeze(1).chunk(2, dim=-1)
    low, high = _wide(x).chunk(2, dim=-1)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1).to(x.dtype)


def store(keys: Tensor, values: Tensor, arena: Arena, layer: int, slots: Tensor) -> None:
    """`keys` and `values` are [tokens, kv heads, head_dim]."""
    size = arena.block_size
    blocks, places = slots.long() // size, slots.long() % size
    for plane, vectors in enumerate((keys, values)):
        if arena.scales is not None:
            vectors, scales = to_int8(vectors)
            arena.scales[blocks, layer, plane, :, places] = scales
        elif arena.data.dtype == FP8:
            vectors = vectors.clamp(-FP8_LARGEST, FP8_LARGEST)
        arena.data[blocks, layer, plane, :, places] = vectors.to(arena.data.dtype)


def to_int8(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded to integers (half up), and each vector's scale as float16."""
    wide = _wide(vectors)
    scales = (wide.abs().amax(-1) / INT8_LARGEST).half()
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales.to(wide.dtype))
    return (wide * inverse[..., None] + 0.5).floor().clamp(-INT8_LARGEST, INT8_LARGEST), scales


def attend(q: Tensor, arena: Arena, layer: int, batch: StepBatch, *, alone: bool = False) -> Tensor:
    """Every query, [tokens, heads, head_dim], over its sequence up to itself; with `alone` one by one."""
    out = torch.empty_like(q)
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    for row, length in enumerate(lengths):
        keys, values = _sequence(arena, layer, batch.tables[row], length)
        begin, end = starts[row], starts[row + 1]
        step = 1 if alone else end - begin
        for first in range(begin, end, step):
            seen = length - (end - first - step)
            queries = q[first : first + step]
            out[first : first + step] = _attend_one(queries, keys[:, :seen], values[:, :seen]).to(q.dtype)
    return out


def _sequence(arena: Arena, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """K and V of a sequence, [kv heads, length, head_dim] each."""
    blocks = table[: -(-length // arena.block_size)].long()
    both = _wide(arena.data[blocks, layer])
    if arena.scales is not None:
        both = both * arena.scales[blocks, layer].float()[..., None]
    keys, values = both.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return keys, values


def _attend_one(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    tokens, heads, head_dim = q.shape
    kv_heads, length, _ = keys.shape
    grouped = _wide(q).view(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = grouped @ keys.to(grouped.dtype).unsqueeze(1).transpose(-1, -2) * head_dim**-0.5
    positions = torch.arange(length, device=q.device)
    hidden = positions > positions[length - tokens :, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    attended = weights @ values.to(grouped.dtype).unsqueeze(1)
    return attended.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)
