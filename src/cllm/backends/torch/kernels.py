"""Triton kernels of what is done row by row: norms, activation, rotation with the writing of K and V.

K and V are those of one layer in all blocks: `layer` is an offset into a block, in elements, and so is the distance
from K to V; within, both are [kv heads, block_size, head_dim]. Scales, where K and V have them, lie in the same order,
one for each vector: an offset among them is that among the elements divided by head_dim. Numbers are multiplied as
float32 and rounded after each operation, as plain torch does it, and as Triton's interpreter can.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def norm_kernel(x, residual, weight, out, eps, width: tl.constexpr, padded: tl.constexpr, adds: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, padded)
    inside = columns < width
    value = tl.load(x + row + columns, mask=inside, other=0.0)
    if adds:
        value = (value.to(tl.float32) + tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype.element_ty
        )
        tl.store(residual + row + columns, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * scale).to(x.dtype.element_ty).to(tl.float32)
    normed *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(gate_up, out, width, tile: tl.constexpr, gelu: tl.constexpr = False):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + columns, mask=inside, other=0.0).to(tl.float32)
    if gelu:  # approximated by tanh, which is 2 sigmoid(2 x) - 1
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    activated = activated.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + columns, (activated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_store_kernel(
    qkv, queries, kv, scales, q_norm, k_norm, rotations, positions, slots, eps, layer, block_stride, v_offset,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, half: tl.constexpr, padded: tl.constexpr,
    size: tl.constexpr, norms: tl.constexpr, stored: tl.constexpr, chained: tl.constexpr,
):  # fmt: skip
    """A program is a token and a head, of queries, keys or values."""
    if chained:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, padded)
    inside = columns < half
    source = qkv + (token * (heads + 2 * kv_heads) + head) * dim
    low = tl.load(source + columns, mask=inside, other=0.0)
    high = tl.load(source + half + columns, mask=inside, other=0.0)
    if head < heads + kv_heads:
        low_wide, high_wide = low.to(tl.float32), high.to(tl.float32)
        if norms:
            weight = q_norm if head < heads else k_norm
            total = tl.sum(low_wide * low_wide, axis=0) + tl.sum(high_wide * high_wide, axis=0)
            scale = tl.rsqrt(total / dim + eps)
            low_weight = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
            high_weight = tl.load(weight + half + columns, mask=inside, other=0.0).to(tl.float32)
            low_wide = ((low_wide * scale).to(low.dtype).to(tl.float32) * low_weight).to(low.dtype).to(tl.float32)
            high_wide = ((high_wide * scale).to(low.dtype).to(tl.float32) * high_weight).to(low.dtype).to(tl.float32)
        turn = rotations + tl.load(positions + token).to(tl.int64) * dim
        cosine = tl.load(turn + columns, mask=inside, other=0.0)
        sine = tl.load(turn + half + columns, mask=inside, other=0.0)
        low = (low_wide * cosine - high_wide * sine).to(low.dtype)
        high = (high_wide * cosine + low_wide * sine).to(high.dtype)
    if head < heads:
        target = queries + (token * heads + head) * dim
        tl.store(target + columns, low, mask=inside)
        tl.store(target + half + columns, high, mask=inside)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        plane, kv_head = (head - heads) // kv_heads, (head - heads) % kv_heads
        place = slot // size * block_stride + layer + plane * v_offset + (kv_head * size + slot % size) * dim
        if stored == "int8":
            low_part, high_part = low.to(tl.float32), high.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(low_part), axis=0), tl.max(tl.abs(high_part), axis=0))
            unit = (largest / 127.0).to(scales.dtype.element_ty)
            tl.store(scales + place // dim, unit)
            inverse = tl.where(unit == 0.0, 0.0, 1.0 / unit.to(tl.float32))
            low_part, high_part = _to_int8(low_part, inverse), _to_int8(high_part, inverse)
        elif stored == "fp8":
            low_part = tl.clamp(low.to(tl.float32), -448.0, 448.0)
            high_part = tl.clamp(high.to(tl.float32), -448.0, 448.0)
        else:
            low_part, high_part = low, high
        tl.store(kv + place + columns, low_part.to(kv.dtype.element_ty), mask=inside)
        tl.store(kv + place + half + columns, high_part.to(kv.dtype.element_ty), mask=inside)


@triton.jit
def _to_int8(values, inverse):
    return tl.clamp(tl.floor(values * inverse + 0.5), -127.0, 127.0)
