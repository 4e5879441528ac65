"""Matrix products on a GPU: fast ones, and batch-invariant ones."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from cllm.backends.torch.linear import FP8
from cllm.backends.torch.matrix_kernels import product_kernel, quantise_kernel

FEW_ROWS = 64
SMALLEST_DOT = 16
FP8_MULTIPLE = 16


class ProductTile(NamedTuple):
    rows: int
    columns: int
    width: int
    warps: int
    stages: int


def fast_tile(rows: int) -> ProductTile:
    if rows > FEW_ROWS:
        return ProductTile(128, 128, 64, 8, 4)
    return ProductTile(max(SMALLEST_DOT, triton.next_power_of_2(rows)), 64, 128, 4, 4)


def invariant_tile(bytes_each: int) -> ProductTile:
    """By the weight's type alone, never by the number of rows."""
    return ProductTile(32, 32, 32, 4, 3) if bytes_each == 4 else ProductTile(64, 64, 64, 4, 4)


def fast_linear(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """Weights in fp8 meet rows in fp8, each with its own scale, where the GPU multiplies such."""
    if scales is None:
        return functional.linear(x, weight, bias)
    if (
        x.dtype == torch.bfloat16
        and _multiplies_fp8(x.device)
        and not any(size % FP8_MULTIPLE for size in weight.shape)
    ):
        rows, row_scales = quantise(x)
        out: Tensor = torch._scaled_mm(
            rows, weight.t(), row_scales, scales[None], out_dtype=x.dtype, use_fast_accum=True
        )
        return out if bias is None else out.add_(bias)
    return product(x, weight, scales, bias, fast_tile(len(x)))


def invariant_linear(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    return product(x, weight, scales, bias, invariant_tile(weight.itemsize))


@lru_cache
def _multiplies_fp8(device: torch.device) -> bool:
    return bool(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in fp8, and their scales, [rows, 1]."""
    rows, width = x.shape
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        quantise_kernel[(rows,)](x, out, scales, width=width, padded=triton.next_power_of_2(width), num_warps=8)
    return out, scales


def product(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, tile: ProductTile) -> Tensor:
    """Weights in fp8 are widened within."""
    rows, (columns, width) = len(x), weight.shape
    out = x.new_empty(rows, columns)
    if not rows:
        return out
    product_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns))](
        *(x, weight, x if scales is None else scales, x if bias is None else bias, out, rows, columns),
        width=width,
        row_tile=tile.rows,
        column_tile=tile.columns,
        tile=tile.width,
        scaled=scales is not None,
        biased=bias is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
