"""Matrix-vector products, which take as long as reading the matrix: the norm before and the activation after are fused.

Every program computes the norm for itself and applies the activation to its results, so that a layer of one row is six
launches instead of ten.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from cllm.backends.torch.matrix_kernels import gemv_kernel


class Tile(NamedTuple):
    rows: int
    columns: int
    warps: int


LONG_ROW = 8192


def tile_of(bytes_each: int, width: int, gated: bool) -> Tile:
    """What is fastest was measured on an H200, for rows as long as those of models of 1B and 8B."""
    if bytes_each > 1:
        if gated:
            return Tile(2, 2048, 8)
        return Tile(2, 1024, 8) if width >= LONG_ROW else Tile(4, 2048, 4)
    if width >= LONG_ROW:
        return Tile(4, 2048, 4)
    return Tile(4, 4096, 8 if gated else 4) if width >= 4096 else Tile(8, 2048, 8 if gated else 4)


@lru_cache
def chains(device: torch.device) -> bool:
    """Whether a kernel can begin while the one before it ends."""
    return bool(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))


def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    chained: bool | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The product with one row, [1, width], and x + residual if there is one."""
    rows, width = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    tile = tile or tile_of(weight.itemsize, width, gated)
    if chained is None:
        chained = chains(x.device)
    out = x.new_empty(1, rows)
    sums = torch.empty_like(x) if residual is not None else None
    options = {"launch_pdl": True} if chained else {}
    gemv_kernel[(triton.cdiv(rows, tile.rows),)](
        *(x, x if residual is None else residual, x if norm is None else norm, weight),
        *(x if scales is None else scales, x if bias is None else bias, out, x if sums is None else sums, eps, rows),
        width=width,
        padded=triton.next_power_of_2(width) if norm is not None else 1,
        tile_rows=tile.rows,
        tile=tile.columns,
        norms=norm is not None,
        adds=residual is not None,
        biased=bias is not None,
        scaled=scales is not None,
        gated=gated,
        chained=chained,
        num_warps=tile.warps,
        **options,
    )
    return out, sums
