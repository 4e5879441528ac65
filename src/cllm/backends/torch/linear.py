"""Matrix products with weights in fp8: every row of a matrix has a scale of its own."""

from __future__ import annotations

import torch

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows of a matrix in fp8, and what each is to be multiplied with."""
    wide = rows.float()
    scales = wide.abs().amax(1).clamp_min(1e-12) / _LARGEST
    return (wide / scales[:, None]).to(torch.float8_e4m3fn), scales
