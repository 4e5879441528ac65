"""Matrix times few vectors, which costs as long as reading the matrix takes: whatever else is to do is done on the way.

A norm before the product is computed by every program for itself, and an activation after it where the results are, so
that a layer of one row is six launches instead of ten.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_ROWS = 8
TILE_COLUMNS = 1024
WARPS = 8


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
    width: tl.constexpr, padded: tl.constexpr, tile_rows: tl.constexpr, tile: tl.constexpr,
    norms: tl.constexpr, adds: tl.constexpr, biased: tl.constexpr, scaled: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """`rows` outputs. With `gated` the weight has twice as many: silu of the first half times the second."""
    program = tl.program_id(0)
    scale = 0.0
    if norms:
        columns = tl.arange(0, padded)
        inside = columns < width
        value = tl.load(x + columns, mask=inside, other=0.0)
        if adds:
            value = (value.to(tl.float32) + tl.load(residual + columns, mask=inside, other=0.0).to(tl.float32)).to(
                value.dtype
            )
            if program == 0:  # elsewhere than it is read: other programs still read
                tl.store(sums + columns, value, mask=inside)
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    row = program * tile_rows + tl.arange(0, tile_rows)
    present = row < rows
    first = row.to(tl.int64)[:, None] * width
    total = tl.zeros([tile_rows, tile], tl.float32)
    second = tl.zeros([tile_rows, tile], tl.float32)
    for start in range(0, width, tile):
        at = start + tl.arange(0, tile)
        within = at < width
        mask = present[:, None] & within[None, :]
        piece = _inputs(x, residual, norm, at, within, scale, norms, adds)
        total += tl.load(weight + first + at[None, :], mask=mask, other=0.0).to(tl.float32) * piece[None, :]
        if gated:
            below = weight + tl.cast(rows, tl.int64) * width
            second += tl.load(below + first + at[None, :], mask=mask, other=0.0).to(tl.float32) * piece[None, :]
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


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The product with one row, [1, width], and x + residual if there is one."""
    rows, width = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = x.new_empty(1, rows)
    sums = torch.empty_like(x) if residual is not None else None
    gemv_kernel[(triton.cdiv(rows, TILE_ROWS),)](
        *(x, x if residual is None else residual, x if norm is None else norm, weight),
        *(x if scales is None else scales, x if bias is None else bias, out, x if sums is None else sums, eps, rows),
        width=width,
        padded=triton.next_power_of_2(width) if norm is not None else 1,
        tile_rows=TILE_ROWS,
        tile=TILE_COLUMNS,
        norms=norm is not None,
        adds=residual is not None,
        biased=bias is not None,
        scaled=scales is not None,
        gated=gated,
        num_warps=WARPS,
        num_stages=3,
    )
    return out, sums
