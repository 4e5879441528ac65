"""Triton kernels of attention over blocks.

K and V are addressed as in `kernels.py`. All kernels go through the context tile by tile, with a running softmax: the
highest score so far (`peak`, in powers of two), the sum of the weights (`total`) and of the weighted values (`sum`).
The context is cut into splits; what one program found in a split is its state, and states are merged in order by the
program that is last to finish, which a counter tells.

With a `window`, a query sees so many positions, itself included, and splits before that are left out. With a `softcap`,
`factor` divides by it, too. `sinks` are scores of the heads that take weight and give no value. Where a model has none
of these, nothing of them is compiled.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _queries(q, kv, at, present):
    """In the type that keys and values are widened to: of fp8 that is f16, which GPUs have an instruction for."""
    query = tl.load(q + at, mask=present[:, None], other=0.0)
    if kv.dtype.element_ty == tl.float8e4nv and q.dtype.element_ty == tl.bfloat16:
        query = query.to(tl.float16)
    return query


@triton.jit
def _absorb(
    query, sum_, total, peak, visible, seen, place, keys, values, key_scales, value_scales, factor,
    dim: tl.constexpr, scaled: tl.constexpr, softcap: tl.constexpr = 0.0,
):  # fmt: skip
    """One more tile of the context. Where a query sees nothing of it, its state stays as it is, to the bit."""
    columns = tl.arange(0, dim)
    at = place[:, None] * dim + columns[None, :]
    key = tl.load(keys + at, mask=seen[:, None], other=0.0).to(query.dtype)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * factor
    if scaled:
        score *= tl.load(key_scales + place, mask=seen, other=0.0).to(tl.float32)[None, :]
    if softcap > 0:  # softcap * tanh(score), in powers of two
        score = (2.0 * tl.sigmoid(2.0 * score) - 1.0) * (softcap * 1.4426950408889634)
    score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, axis=1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - shift[:, None])
    fade = tl.exp2(peak - shift)
    total = total * fade + tl.sum(weight, axis=1)
    if scaled:
        weight *= tl.load(value_scales + place, mask=seen, other=0.0).to(tl.float32)[None, :]
    value = tl.load(values + at, mask=seen[:, None], other=0.0).to(query.dtype)
    sum_ = sum_ * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return sum_, total, higher


@triton.jit
def _merge(sum_, total, peak, other_sum, other_total, other_peak, window: tl.constexpr = 0):
    higher = tl.maximum(peak, other_peak)
    shift = higher
    if window:  # both may have seen nothing
        shift = tl.where(higher == float("-inf"), 0.0, higher)
    fade, gain = tl.exp2(peak - shift), tl.exp2(other_peak - shift)
    return sum_ * fade[:, None] + other_sum * gain[:, None], total * fade + other_total * gain, higher


@triton.jit
def _result(sum_, total, peak, sinks, head, present):
    """The weighted mean of the values."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=present, other=0.0).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(peak, sink)
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.exp2(sink - higher)
        sum_ = sum_ * fade[:, None]
    return sum_ / total[:, None]


@triton.jit
def _save(sums, totals, peaks, state, present, sum_, total, peak, dim: tl.constexpr):
    columns = tl.arange(0, dim)
    tl.store(sums + state[:, None] * dim + columns[None, :], sum_, mask=present[:, None])
    tl.store(totals + state, total, mask=present)
    tl.store(peaks + state, peak, mask=present)


@triton.jit
def _saved(sums, totals, peaks, state, present, dim: tl.constexpr):
    """Other programs wrote it: nothing of it may come from this processor's own cache."""
    columns = tl.arange(0, dim)
    at = sums + state[:, None] * dim + columns[None, :]
    sum_ = tl.load(at, mask=present[:, None], other=0.0, cache_modifier=".cg")
    total = tl.load(totals + state, mask=present, other=1.0, cache_modifier=".cg")
    peak = tl.load(peaks + state, mask=present, other=0.0, cache_modifier=".cg")
    return sum_, total, peak


@triton.jit
def _finish(
    sums, totals, peaks, arrivals, out, target, states, part, first, count, present, sum_, total, peak,
    dim: tl.constexpr, sinks=None, head=None,
):  # fmt: skip
    """The result of a row and KV head, if this was all of it or the last part to arrive; `first` parts were before."""
    columns = tl.arange(0, dim)
    at = out + target[:, None] + columns[None, :]
    if count == 1:
        tl.store(at, _result(sum_, total, peak, sinks, head, present).to(out.dtype.element_ty), mask=present[:, None])
    else:
        _save(sums, totals, peaks, states + part, present, sum_, total, peak, dim)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals, 1, sem="acq_rel")
        if arrived == count - first - 1:
            tl.store(arrivals, 0)
            sum_, total, peak = _saved(sums, totals, peaks, states, present, dim)
            for other in tl.range(1, count, loop_unroll_factor=4):
                other_sum, other_total, other_peak = _saved(sums, totals, peaks, states + other, present, dim)
                sum_, total, peak = _merge(sum_, total, peak, other_sum, other_total, other_peak)
            result = _result(sum_, total, peak, sinks, head, present)
            tl.store(at, result.to(out.dtype.element_ty), mask=present[:, None])


@triton.jit(do_not_specialize=["table_stride", "splits", "split"])
def decode_kernel(
    q, kv, scales, tables, lengths, firsts, sums, totals, peaks, arrivals, out, factor,
    table_stride, layer, block_stride, v_offset, splits, split,
    heads: tl.constexpr, kv_heads: tl.constexpr, group: tl.constexpr, group_padded: tl.constexpr, dim: tl.constexpr,
    size: tl.constexpr, tile: tl.constexpr, scaled: tl.constexpr, shared: tl.constexpr,
    chained: tl.constexpr, window: tl.constexpr = 0, softcap: tl.constexpr = 0.0, sinks=None,
):  # fmt: skip
    """The queries of one KV head of one row, over one split of its positions."""
    if chained:
        gdc_launch_dependents()
        gdc_wait()
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + row)
    before = tl.full((), 0, tl.int32)
    if shared:
        before = tl.load(firsts + row)
    lowest = tl.full((), 0, tl.int32)
    if window:
        lowest = tl.maximum(length - window, 0) // split
    part = before + lowest + tl.program_id(2)
    first = part * split
    if first >= length:
        return
    last = tl.minimum(first + split, length)
    index = tl.arange(0, group_padded)
    columns = tl.arange(0, dim)
    head = kv_head * group + index
    present = index < group
    target = (row * heads + head) * dim
    query = _queries(q, kv, target[:, None] + columns[None, :], present)
    peak = tl.full([group_padded], float("-inf"), tl.float32)
    total = tl.zeros([group_padded], tl.float32)
    sum_ = tl.zeros([group_padded, dim], tl.float32)
    base = layer + kv_head * size * dim
    if window:
        first = tl.maximum(first, length - window)
    for start in range(first, last, tile):
        at = start + tl.arange(0, tile)
        seen = at < last
        block = tl.load(tables + row * table_stride + at // size, mask=seen, other=0).to(tl.int64)
        place = block * (block_stride // dim) + at % size
        sum_, total, peak = _absorb(
            query, sum_, total, peak, seen[None, :], seen, place, kv + base, kv + base + v_offset,
            scales + base // dim, scales + (base + v_offset) // dim, factor, dim, scaled, softcap,
        )  # fmt: skip
    count = (length + split - 1) // split
    if window:
        part, count = part - lowest, count - lowest
    states = (row * heads + head) * splits
    arrival = arrivals + row * kv_heads + kv_head
    _finish(
        sums, totals, peaks, arrival, out, target, states, part, before, count, present, sum_, total, peak, dim,
        sinks, head,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "splits", "split"])
def shared_kernel(
    q, kv, scales, tables, members, extents, sums, totals, peaks, factor,
    table_stride, layer, block_stride, v_offset, splits, split,
    heads: tl.constexpr, group: tl.constexpr, together: tl.constexpr, queries: tl.constexpr, dim: tl.constexpr,
    size: tl.constexpr, tile: tl.constexpr, scaled: tl.constexpr, softcap: tl.constexpr = 0.0,
):  # fmt: skip
    """The queries of one KV head of some rows, over one split of what begins all of them."""
    number, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if part >= tl.load(extents + number):
        return
    index = tl.arange(0, queries)
    member = index // group
    row = tl.load(members + number * together + member, mask=member < together, other=-1).to(tl.int64)
    present = row >= 0
    anyone = tl.load(members + number * together).to(tl.int64)
    columns = tl.arange(0, dim)
    head = row * heads + kv_head * group + index % group
    query = _queries(q, kv, head[:, None] * dim + columns[None, :], present)
    peak = tl.full([queries], float("-inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    sum_ = tl.zeros([queries, dim], tl.float32)
    base = layer + kv_head * size * dim
    for start in range(part * split, (part + 1) * split, tile):
        at = start + tl.arange(0, tile)
        seen = at >= 0
        block = tl.load(tables + anyone * table_stride + at // size).to(tl.int64)
        place = block * (block_stride // dim) + at % size
        sum_, total, peak = _absorb(
            query, sum_, total, peak, seen[None, :], seen, place, kv + base, kv + base + v_offset,
            scales + base // dim, scales + (base + v_offset) // dim, factor, dim, scaled, softcap,
        )  # fmt: skip
    _save(sums, totals, peaks, head * splits + part, present, sum_, total, peak, dim)


@triton.jit(do_not_specialize=["first_row", "table_stride"])
def prompt_kernel(
    q, kv, scales, tables, starts, lengths, out, first_row, factor, table_stride, layer, block_stride, v_offset,
    heads: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, size: tl.constexpr,
    q_tile: tl.constexpr, tile: tl.constexpr, scaled: tl.constexpr, window: tl.constexpr = 0,
    softcap: tl.constexpr = 0.0, sinks=None,
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
    target = ((begin + index)[:, None] * heads + head) * dim + columns[None, :]
    query = _queries(q, kv, target, present)
    peak = tl.full([q_tile], float("-inf"), tl.float32)
    total = tl.zeros([q_tile], tl.float32)
    sum_ = tl.zeros([q_tile, dim], tl.float32)
    base = layer + head // group * size * dim
    last = tl.minimum(length, length - tokens + (number + 1) * q_tile)
    lowest = 0
    if window:
        lowest = tl.maximum(length - tokens + number * q_tile - window + 1, 0) // tile * tile
    for start in range(lowest, last, tile):
        at = start + tl.arange(0, tile)
        seen = at < last
        block = tl.load(tables + row * table_stride + at // size, mask=seen, other=0).to(tl.int64)
        place = block * (block_stride // dim) + at % size
        visible = at[None, :] <= position[:, None]
        if window:
            visible = visible & (at[None, :] > position[:, None] - window)
        sum_, total, peak = _absorb(
            query, sum_, total, peak, visible, seen, place, kv + base, kv + base + v_offset,
            scales + base // dim, scales + (base + v_offset) // dim, factor, dim, scaled, softcap,
        )  # fmt: skip
    at = out + target
    result = _result(sum_, total, peak, sinks, tl.full([q_tile], 0, tl.int32) + head, present)
    tl.store(at, result.to(out.dtype.element_ty), mask=present[:, None])


@triton.jit
def _split(
    query, position, first, last, table, kv, scales, base, block_stride, v_offset, factor,
    height: tl.constexpr, dim: tl.constexpr, size: tl.constexpr, tile: tl.constexpr, scaled: tl.constexpr,
    window: tl.constexpr = 0, softcap: tl.constexpr = 0.0,
):  # fmt: skip
    """The state of one split, from nothing."""
    peak = tl.full([height], float("-inf"), tl.float32)
    total = tl.zeros([height], tl.float32)
    sum_ = tl.zeros([height, dim], tl.float32)
    for start in range(first, last, tile):
        at = start + tl.arange(0, tile)
        seen = at < last
        block = tl.load(table + at // size, mask=seen, other=0).to(tl.int64)
        place = block * (block_stride // dim) + at % size
        visible = at[None, :] <= position[:, None]
        if window:
            visible = visible & (at[None, :] > position[:, None] - window)
        sum_, total, peak = _absorb(
            query, sum_, total, peak, visible, seen, place, kv + base, kv + base + v_offset,
            scales + base // dim, scales + (base + v_offset) // dim, factor, dim, scaled, softcap,
        )  # fmt: skip
    return sum_, total, peak


@triton.jit(do_not_specialize=["first_row", "table_stride", "splits"])
def invariant_kernel(
    q, kv, scales, tables, starts, lengths, sums, totals, peaks, arrivals, out, first_row, factor,
    table_stride, layer, block_stride, v_offset, splits,
    heads: tl.constexpr, kv_heads: tl.constexpr, group: tl.constexpr, height: tl.constexpr, dim: tl.constexpr,
    size: tl.constexpr, split: tl.constexpr, tile: tl.constexpr, scaled: tl.constexpr, parted: tl.constexpr,
    window: tl.constexpr = 0, softcap: tl.constexpr = 0.0, sinks=None,
):  # fmt: skip
    """Queries of one KV head, as pairs of a token and a head, `height` at a time, over splits that positions define.

    With `parted`, a program has one split of a row of one token; otherwise all of them, one after the other. The sums
    are the same, in the same order.
    """
    kv_head = tl.program_id(1)
    local = tl.program_id(0) if parted else tl.program_id(2)
    row = first_row + local.to(tl.int64)
    number = tl.full((), 0, tl.int32)
    if not parted:
        number = tl.num_programs(0) - 1 - tl.program_id(0)
    begin = tl.load(starts + row).to(tl.int64)
    tokens = (tl.load(starts + row + 1) - begin).to(tl.int32)
    length = tl.load(lengths + row)
    lowest = tl.full((), 0, tl.int32)
    if window:
        lowest = tl.maximum(length - tokens + number * height // group - window + 1, 0) // split
    first = lowest * split
    if parted:
        first += tl.program_id(2) * split
    if (number * height >= tokens * group) | (first >= length):
        return
    index = number * height + tl.arange(0, height)
    token = index // group
    position = length - tokens + token
    present = token < tokens
    columns = tl.arange(0, dim)
    target = ((begin + token) * heads + kv_head * group + index % group) * dim
    query = _queries(q, kv, target[:, None] + columns[None, :], present)
    end = tl.minimum(length, length - tokens + (number * height + height - 1) // group + 1)
    table = tables + row * table_stride
    base = layer + kv_head * size * dim
    sum_, total, peak = _split(
        query, position, first, tl.minimum(first + split, end), table, kv, scales, base, block_stride, v_offset,
        factor, height, dim, size, tile, scaled, window, softcap,
    )  # fmt: skip
    if parted:
        count = (length + split - 1) // split - lowest
        states = (local.to(tl.int64) * heads + kv_head * group + index) * splits
        arrival = arrivals + local * kv_heads + kv_head
        part = first // split - lowest
        _finish(
            sums, totals, peaks, arrival, out, target, states, part, 0, count, present, sum_, total, peak, dim,
            sinks, kv_head * group + index,
        )  # fmt: skip
    else:
        for start in range(first + split, end, split):
            other_sum, other_total, other_peak = _split(
                query, position, start, tl.minimum(start + split, end), table, kv, scales, base, block_stride,
                v_offset, factor, height, dim, size, tile, scaled, window, softcap,
            )  # fmt: skip
            sum_, total, peak = _merge(sum_, total, peak, other_sum, other_total, other_peak, window)
        at = out + target[:, None] + columns[None, :]
        result = _result(sum_, total, peak, sinks, kv_head * group + index % group, present)
        tl.store(at, result.to(out.dtype.element_ty), mask=present[:, None])
