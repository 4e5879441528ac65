"""The operations in plain torch: the reference for the kernels, and what runs where there is no GPU.

Computed in float32, or in float64 if the inputs are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cllm.backends.torch.arena import LayerMemory
from cllm.backends.torch.batch import StepBatch
from cllm.backends.torch.linear import FP8, FP8_LARGEST
from cllm.models.spec import Activation, AttentionSpec

INT8_LARGEST = 127.0
Norm = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True, slots=True)
class Attention:
    """What a layer's attention is computed with, besides its matrices."""

    spec: AttentionSpec
    eps: float
    rotations: Tensor
    """[positions, head_dim]: cosines, then sines"""
    factors: Tensor | None = None
    """[positions]: what queries are multiplied by"""
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def scale(self) -> float:
        return self.spec.head_dim_k**-0.5 if self.spec.scale is None else self.spec.scale


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual` becomes x + residual; its norm is returned."""
    residual += x
    return rms_norm(residual, weight, eps)


def gate_multiply(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation) * up


def activate(x: Tensor, activation: Activation) -> Tensor:
    if activation == "relu2":
        return functional.relu(x).square()
    return functional.silu(x) if activation == "silu" else functional.gelu(x, approximate="tanh")


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """`x` is [tokens, heads, head_dim], `rotations` [tokens, head_dim]: cosines, then sines."""
    cosines, sines = rotations.unsqueeze(1).chunk(2, dim=-1)
    low, high = _wide(x).chunk(2, dim=-1)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1).to(x.dtype)


def prepare(qkv: Tensor, attention: Attention, norm: Norm = rms_norm) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as [tokens, heads, head_dim]: normalised as far as that comes before they are turned.
    There are no keys and values where a layer takes those of another."""
    own, tokens = attention.spec, len(qkv)
    q, rest = qkv[:, : own.q_size], qkv[:, own.q_size :]
    k = rest[:, : own.k_size]
    v = (k if own.v_is_k else rest[:, own.k_size :]).reshape(tokens, -1, own.head_dim_v)
    if own.qk_norm == "row" and not own.qk_norm_last:
        q, k = _norm_both(q, k, attention, norm)
    q, k = (part.reshape(tokens, -1, own.head_dim_k) for part in (q, k))
    if own.qk_norm == "head" and not own.qk_norm_last:
        q, k = _norm_both(q, k, attention, norm)
    if own.v_norm and own.kv_from is None:
        v = norm(v, v.new_ones(own.head_dim_v), attention.eps)
    return q, k, v


def rotate_and_store(
    qkv: Tensor, attention: Attention, batch: StepBatch, memory: LayerMemory, norm: Norm = rms_norm
) -> Tensor:
    own, turned = attention.spec, attention.rotations[batch.positions.long()]
    q, k, v = prepare(qkv, attention, norm)
    q, k = rotate(q, turned), rotate(k, turned)
    if own.qk_norm_last:
        q, k = _norm_both(q, k, attention, norm)
    if own.kv_from is None:
        store(k, v, memory, batch.slots)
    return temper(q, attention, batch)


def temper(q: Tensor, attention: Attention, batch: StepBatch) -> Tensor:
    if attention.factors is None:
        return q
    return q * attention.factors[batch.positions.long()].to(q.dtype)[:, None, None]


def _norm_both(q: Tensor, k: Tensor, attention: Attention, norm: Norm) -> tuple[Tensor, Tensor]:
    assert attention.q_norm is not None
    q = norm(q, attention.q_norm, attention.eps)
    return q, k if attention.k_norm is None else norm(k, attention.k_norm, attention.eps)


def store(keys: Tensor, values: Tensor, memory: LayerMemory, slots: Tensor) -> None:
    """`keys` and `values` are [tokens, kv heads, head_dim]."""
    size = memory.block_size
    blocks, places = slots.long() // size, slots.long() % size
    parts = (keys, memory.keys, memory.key_scales), (values, memory.values, memory.value_scales)
    for vectors, plane, plane_scales in parts:
        if plane_scales is not None:
            vectors, scales = to_int8(vectors)
            plane_scales[blocks, :, places] = scales
        elif plane.dtype == FP8:
            vectors = vectors.clamp(-FP8_LARGEST, FP8_LARGEST)
        narrow = vectors.to(plane.dtype)
        if plane.itemsize == 1:  # not every operation is there for fp8
            plane, narrow = plane.view(torch.uint8), narrow.view(torch.uint8)
        plane[blocks, :, places] = narrow


def to_int8(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded to integers (half up), and each vector's scale as float16."""
    wide = _wide(vectors)
    scales = (wide.abs().amax(-1) / INT8_LARGEST).half()
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales.to(wide.dtype))
    return (wide * inverse[..., None] + 0.5).floor().clamp(-INT8_LARGEST, INT8_LARGEST), scales


def attend(q: Tensor, attention: Attention, batch: StepBatch, memory: LayerMemory, *, alone: bool = False) -> Tensor:
    """Every query, [tokens, heads, head_dim], over its sequence up to itself; with `alone` one by one."""
    window = attention.spec.window
    out = q.new_empty(*q.shape[:2], attention.spec.head_dim_v)
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        least = max(0, length - (end - begin) - window + 1) if window else 0
        least -= least % memory.block_size
        keys, values = _sequence(memory, batch.tables[row], least, length)
        step = 1 if alone else end - begin
        for first in range(begin, end, step):
            seen = length - (end - first - step) - least
            before = max(0, seen - window) if window and alone else 0
            queries = q[first : first + step]
            parts = keys[:, before:seen], values[:, before:seen]
            out[first : first + step] = _attend_one(queries, *parts, attention).to(q.dtype)
    return out


def _sequence(memory: LayerMemory, table: Tensor, least: int, length: int) -> tuple[Tensor, Tensor]:
    """K and V of a sequence from position `least` on, where a block begins: [kv heads, positions, head_dim] each."""
    size = memory.block_size
    blocks = table[least // size : -(-length // size)].long()
    found = []
    for plane, scales in ((memory.keys, memory.key_scales), (memory.values, memory.value_scales)):
        vectors = _wide(plane[blocks])
        if scales is not None:
            vectors = vectors * scales[blocks].float()[..., None]
        found.append(vectors.permute(1, 0, 2, 3).flatten(1, 2)[:, : length - least])
    return found[0], found[1]


def _attend_one(q: Tensor, keys: Tensor, values: Tensor, attention: Attention) -> Tensor:
    tokens, heads, head_dim = q.shape
    own, (kv_heads, length, _) = attention.spec, keys.shape
    grouped = _wide(q).view(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = grouped @ keys.to(grouped.dtype).unsqueeze(1).transpose(-1, -2) * attention.scale
    if own.softcap:
        scores = torch.tanh(scores / own.softcap) * own.softcap
    positions = torch.arange(length, device=q.device)
    own_positions = positions[length - tokens :, None]
    hidden = positions > own_positions
    if own.window:
        hidden |= positions <= own_positions - own.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if attention.sinks is not None:
        sinks = attention.sinks.to(scores.dtype).view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., :length]
    attended = weights @ values.to(grouped.dtype).unsqueeze(1)
    return attended.permute(2, 0, 1, 3).reshape(tokens, heads, -1)
