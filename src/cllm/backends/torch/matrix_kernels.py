"""Triton kernels of matrix products whose weights are read once: fp8 is widened on the way, and scaled in the sum."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _inputs(x, residual, norm, at, inside, scale, norms: tl.constexpr, adds: tl.constexpr):
    """A piece of the row, normalised if asked for."""
    value = tl.load(x + at, mask=inside, other=0.0)
    if adds:
        other = tl.load(residual + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
    wide = value.to(tl.float32)
    if norms:
        wide = ((wide * scale).to(value.dtype) * tl.load(norm + at, mask=inside, other=0.0)).to(tl.float32)
    return wide


@triton.jit
def gemv_kernel(
    x, residual, norm, weight, scales, bias, out, sums, eps, rows,
    width: tl.constexpr, padded: tl.constexpr, tile_rows: tl.constexpr, tile: tl.constexpr, norms: tl.constexpr,
    adds: tl.constexpr, biased: tl.constexpr, scaled: tl.constexpr, gated: tl.constexpr, chained: tl.constexpr,
):  # fmt: skip
    """`rows` outputs. With `gated` the weight has twice as many: silu of the first half times the second.

    The first weights are asked for before the row is looked at: with `chained`, while the kernel before still runs.
    """
    program = tl.program_id(0)
    row = program * tile_rows + tl.arange(0, tile_rows)
    present = row < rows
    at = tl.arange(0, tile)
    within = at < width
    mask = present[:, None] & within[None, :]
    upper = weight + row.to(tl.int64)[:, None] * width
    lower = upper + tl.cast(rows, tl.int64) * width
    first = tl.load(upper + at[None, :], mask=mask, other=0.0)
    if gated:
        other = tl.load(lower + at[None, :], mask=mask, other=0.0)
    if chained:
        gdc_launch_dependents()
        gdc_wait()
    scale = 0.0
    if norms:
        columns = tl.arange(0, padded)
        inside = columns < width
        value = tl.load(x + columns, mask=inside, other=0.0)
        if adds:
            added = tl.load(residual + columns, mask=inside, other=0.0).to(tl.float32)
            value = (value.to(tl.float32) + added).to(value.dtype)
            if program == 0:  # elsewhere than it is read: other programs still read
                tl.store(sums + columns, value, mask=inside)
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    piece = _inputs(x, residual, norm, at, within, scale, norms, adds)
    total = first.to(tl.float32) * piece[None, :]
    if gated:
        second = other.to(tl.float32) * piece[None, :]
    for start in range(tile, width, tile):
        at = start + tl.arange(0, tile)
        within = at < width
        mask = present[:, None] & within[None, :]
        piece = _inputs(x, residual, norm, at, within, scale, norms, adds)
        total += tl.load(upper + at[None, :], mask=mask, other=0.0).to(tl.float32) * piece[None, :]
        if gated:
            second += tl.load(lower + at[None, :], mask=mask, other=0.0).to(tl.float32) * piece[None, :]
    result = tl.sum(total, axis=1)
    if scaled:
        result *= tl.load(scales + row, mask=present, other=0.0)
    if biased:
        result += tl.load(bias + row, mask=present, other=0.0).to(tl.float32)
    if gated:
        up = tl.sum(second, axis=1)
        if scaled:
            up *= tl.load(scales + rows + row, mask=present, other=0.0)
        result = (result * tl.sigmoid(result)).to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row, result.to(out.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x, weight, scales, bias, out, rows, columns,
    width: tl.constexpr, row_tile: tl.constexpr, column_tile: tl.constexpr, tile: tl.constexpr,
    scaled: tl.constexpr, biased: tl.constexpr,
):  # fmt: skip
    """out = x @ weight.T, [rows, columns]; a tile of weights is the left factor, so that it may come from registers.

    Programs that share weights are neighbours: they are read from memory once.
    """
    row = tl.program_id(0) * row_tile + tl.arange(0, row_tile)
    column = tl.program_id(1) * column_tile + tl.arange(0, column_tile)
    # Beyond the end, something else is computed and not stored: no mask in the loop.
    left = weight + (column % columns).to(tl.int64)[:, None] * width
    right = x + (row % rows).to(tl.int64)[None, :] * width
    total = tl.zeros([column_tile, row_tile], tl.float32)
    for start in range(0, width, tile):
        at = start + tl.arange(0, tile)
        if width % tile == 0:
            part = tl.load(left + at[None, :])
            inputs = tl.load(right + at[:, None])
        else:
            part = tl.load(left + at[None, :], mask=(at < width)[None, :], other=0.0)
            inputs = tl.load(right + at[:, None], mask=(at < width)[:, None], other=0.0)
        total += tl.dot(part.to(x.dtype.element_ty), inputs, input_precision="ieee")
    if scaled:
        total *= tl.load(scales + column, mask=column < columns, other=0.0)[:, None]
    if biased:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
    target = out + row.to(tl.int64)[None, :] * columns + column[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=(column < columns)[:, None] & (row < rows)[None, :])


@triton.jit
def quantise_kernel(x, out, scales, width: tl.constexpr, padded: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded)
    inside = columns < width
    value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), axis=0)
    scale = tl.where(largest == 0.0, 1.0, largest / 448.0)
    tl.store(scales + row, scale)
    value = tl.clamp(value / scale, -448.0, 448.0)
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=inside)
