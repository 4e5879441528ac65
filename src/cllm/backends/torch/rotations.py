"""Cosines and sines of every position: heads are rotated in halves, dimension i together with i + head_dim / 2."""

from __future__ import annotations

import torch

from cllm.models.spec import Rotation

ROTATIONS_TOGETHER = 4096


def rotation_table(rotation: Rotation, positions: int) -> torch.Tensor:
    """[positions, dims]: the cosines of every pair of dimensions, then the sines."""
    frequencies, half = _frequencies(rotation), rotation.dims // 2
    turns = torch.empty((positions, rotation.dims))
    for first in range(0, positions, ROTATIONS_TOGETHER):
        rows = turns[first : first + ROTATIONS_TOGETHER]
        angles = torch.outer(torch.arange(first, first + len(rows), dtype=torch.float64), frequencies)
        rows[:, :half], rows[:, half:] = angles.cos(), angles.sin()
    return turns


def _frequencies(rotation: Rotation) -> torch.Tensor:
    """The angle by which each pair of dimensions turns from one position to the next, in float64."""
    pairs = torch.arange(0, rotation.dims, 2, dtype=torch.float64) / rotation.dims
    turns = rotation.base**-pairs / rotation.scale
    return turns if rotation.divisors is None else turns / torch.tensor(rotation.divisors, dtype=torch.float64)
