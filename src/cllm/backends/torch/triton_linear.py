"""Matrix products on a GPU: fast ones, and ones whose result of a row does not depend on how many there are."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch.nn import functional

from cllm.backends.torch.matrix_kernels import dequantise_kernel, product_kernel

FEW_ROWS = 64
"""Up to here fp8 is widened within the product; of more rows, once for all, before it."""
DEQUANTISE_TILE = 4096
SMALLEST_DOT = 16


class ProductTile(NamedTuple):
    rows: int
    columns: int
    width: int
    warps: int
    stages: int


def few_rows_tile(rows: int, weight: torch.Tensor) -> ProductTile:
    """What is fastest was measured on an H200."""
    return ProductTile(max(SMALLEST_DOT, triton.next_power_of_2(rows)), 64, 256 if weight.itemsize == 1 else 128, 4, 4)


def invariant_tile(weight: torch.Tensor) -> ProductTile:
    """By the weight's shape alone, never by the number of rows."""
    if weight.itemsize == 4:
        return ProductTile(32, 32, 32, 4, 3)
    return ProductTile(64, 64, 64, 4, 4)


class FastLinear:
    """`reserve` before graphs are made: what they use must stay where it is."""

    def __init__(self) -> None:
        self._scratch: torch.Tensor | None = None

    def reserve(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        """Room for a matrix of fp8, widened."""
        if self._scratch is None or self._scratch.numel() < elements or self._scratch.dtype != dtype:
            self._scratch = torch.empty(elements, dtype=dtype, device=device)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if scales is None:
            return functional.linear(x, weight, bias)
        if len(x) <= FEW_ROWS:
            return product(x, weight, scales, bias, few_rows_tile(len(x), weight))
        return functional.linear(x, self._widened(weight, scales), bias)

    def _widened(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        assert self._scratch is not None, "no room was reserved for a matrix of fp8"
        wide = self._scratch[: weight.numel()].view(weight.shape)
        rows, width = weight.shape
        grid = rows, triton.cdiv(width, DEQUANTISE_TILE)
        dequantise_kernel[grid](weight, scales, wide, width, tile=DEQUANTISE_TILE, num_warps=8)
        return wide


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    return product(x, weight, scales, bias, invariant_tile(weight))


def product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None, tile: ProductTile
) -> torch.Tensor:
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
