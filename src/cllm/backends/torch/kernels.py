"""Triton kernels: norms, activation, rotation with the writing of K and V, and attention over blocks.

Strides of K and V are those of one tensor, [blocks, layers, 2, kv heads, block_size, head_dim]; `layer` is an offset
into a block, in elements, and so is the distance from K to V. Numbers are multiplied as float32 and rounded after each
operation, as plain torch does it, and as Triton's interpreter can.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def silu_kernel(gate_up, out, width, tile: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + columns, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + columns, (activated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_store_kernel(
    qkv, queries, kv, q_norm, k_norm, rotations, positions, slots, eps, layer, block_stride, v_offset,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, half: tl.constexpr, padded: tl.constexpr,
    size: tl.constexpr, norms: tl.constexpr,
):  # fmt: skip
    """A program is a token and a head, of queries, keys or values."""
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
        target = kv + slot // size * block_stride + layer + plane * v_offset + (kv_head * size + slot % size) * dim
        tl.store(target + columns, low.to(kv.dtype.element_ty), mask=inside)
        tl.store(target + half + columns, high.to(kv.dtype.element_ty), mask=inside)


@triton.jit
def decode_kernel(
    q, kv, tables, lengths, sums, peaks, totals, scale, table_stride, layer, block_stride, v_offset, splits,
    heads: tl.constexpr, kv_heads: tl.constexpr, group: tl.constexpr, group_padded: tl.constexpr, dim: tl.constexpr,
    size: tl.constexpr, split: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The queries of one KV head of one row, over one split of its positions."""
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = part * split
    if first >= length:
        return
    last = tl.minimum(first + split, length)
    queries = tl.arange(0, group_padded)
    columns = tl.arange(0, dim)
    head = kv_head * group + queries
    present = queries < group
    query = tl.load(q + (row * heads + head[:, None]) * dim + columns[None, :], mask=present[:, None], other=0.0)
    peak = tl.full([group_padded], float("-inf"), tl.float32)
    total = tl.zeros([group_padded], tl.float32)
    sum_ = tl.zeros([group_padded, dim], tl.float32)
    base = kv + layer + kv_head * size * dim
    for start in range(first, last, tile):
        at = start + tl.arange(0, tile)
        seen = at < last
        block = tl.load(tables + row * table_stride + at // size, mask=seen, other=0).to(tl.int64)
        place = block * block_stride + at % size * dim
        key = tl.load(base + place[:, None] + columns[None, :], mask=seen[:, None], other=0.0).to(q.dtype.element_ty)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(peak - higher)
        value = tl.load(base + v_offset + place[:, None] + columns[None, :], mask=seen[:, None], other=0.0).to(
            q.dtype.element_ty
        )
        sum_ = sum_ * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * fade + tl.sum(weight, axis=1)
        peak = higher
    state = (row * heads + head) * splits + part
    tl.store(sums + state[:, None] * dim + columns[None, :], sum_, mask=present[:, None])
    tl.store(peaks + state, peak, mask=present)
    tl.store(totals + state, total, mask=present)


@triton.jit
def merge_kernel(
    sums, peaks, totals, lengths, out, splits,
    heads: tl.constexpr, dim: tl.constexpr, split: tl.constexpr,
):  # fmt: skip
    """Splits of one head joined in order."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, dim)
    state = (row * heads + head) * splits
    peak = tl.load(peaks + state)
    total = tl.load(totals + state)
    sum_ = tl.load(sums + state * dim + columns)
    count = (tl.load(lengths + row) + split - 1) // split
    for part in range(1, count):
        other = tl.load(peaks + state + part)
        higher = tl.maximum(peak, other)
        fade, gain = tl.exp2(peak - higher), tl.exp2(other - higher)
        sum_ = sum_ * fade + tl.load(sums + (state + part) * dim + columns) * gain
        total = total * fade + tl.load(totals + state + part) * gain
        peak = higher
    tl.store(out + (row * heads + head) * dim + columns, (sum_ / total).to(out.dtype.element_ty))


@triton.jit
def prompt_kernel(
    q, kv, tables, starts, lengths, out, first_row, scale, table_stride, layer, block_stride, v_offset,
    heads: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, size: tl.constexpr,
    q_tile: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """A tile of a chunk's queries of one head, over everything up to themselves."""
    head, row = tl.program_id(1), first_row + tl.program_id(2).to(tl.int64)
    begin = tl.load(starts + row).to(tl.int64)
    tokens = (tl.load(starts + row + 1) - begin).to(tl.int32)
    # The last tiles see the most: first come, first served.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    if number * q_tile >= tokens:
        return
    length = tl.load(lengths + row)
    index = number * q_tile + tl.arange(0, q_tile)
    position = length - tokens + index
    columns = tl.arange(0, dim)
    present = index < tokens
    queries = q + ((begin + index)[:, None] * heads + head) * dim + columns[None, :]
    query = tl.load(queries, mask=present[:, None], other=0.0)
    peak = tl.full([q_tile], float("-inf"), tl.float32)
    total = tl.zeros([q_tile], tl.float32)
    sum_ = tl.zeros([q_tile, dim], tl.float32)
    base = kv + layer + head // group * size * dim
    last = tl.minimum(length, length - tokens + (number + 1) * q_tile)
    for start in range(0, last, tile):
        at = start + tl.arange(0, tile)
        seen = at < last
        block = tl.load(tables + row * table_stride + at // size, mask=seen, other=0).to(tl.int64)
        place = block * block_stride + at % size * dim
        key = tl.load(base + place[:, None] + columns[None, :], mask=seen[:, None], other=0.0).to(q.dtype.element_ty)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(at[None, :] <= position[:, None], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(peak - higher)
        value = tl.load(base + v_offset + place[:, None] + columns[None, :], mask=seen[:, None], other=0.0).to(
            q.dtype.element_ty
        )
        sum_ = sum_ * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * fade + tl.sum(weight, axis=1)
        peak = higher
    result = sum_ / total[:, None]
    target = out + ((begin + index)[:, None] * heads + head) * dim + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=present[:, None])
