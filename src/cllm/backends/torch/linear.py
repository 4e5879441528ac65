"""Matrix products with weights as they are, or in fp8 with a scale for each row.

A product is with the transpose, as in `torch.nn.functional.linear`. Here it is plain torch; `triton_linear.py` has it
for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in fp8, and their scales in float32. Works on any piece of a matrix."""
    wide = weight.float()
    largest = wide.abs().amax(-1)
    scales = torch.where(largest == 0, 1.0, largest / FP8_LARGEST)
    return (wide / scales[:, None]).clamp_(-FP8_LARGEST, FP8_LARGEST).to(FP8), scales


def dequantise(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight.float() * scales[:, None]).to(dtype)


def linear(x: Tensor, weight: Tensor, scales: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight if scales is None else dequantise(weight, scales, x.dtype), bias)


def linear_by_row(x: Tensor, weight: Tensor, scales: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """The same, but every row by itself: its result is the same to the bit whatever the others are."""
    wide = weight if scales is None else dequantise(weight, scales, x.dtype)
    if not len(x):
        return functional.linear(x, wide, bias)
    return torch.cat([functional.linear(row, wide, bias) for row in x.split(1)])
