"""Cosines and sines of every position: heads are rotated in halves, dimension i together with i + head_dim / 2.

Where a model pairs dimensions otherwise, or turns only some of them, the rows that make its queries and keys are put in
another order when they are loaded: scores do not depend on the order of dimensions.
"""

from __future__ import annotations

import torch

from cllm.models.spec import AttentionSpec, Rotation, Temperature

ROTATIONS_TOGETHER = 4096


def rotation_table(rotation: Rotation | None, head_dim: int, positions: int) -> torch.Tensor:
    """[positions, head_dim]: the cosines of every pair of dimensions, then the sines. What is not turned comes last."""
    half, turned = head_dim // 2, 0 if rotation is None else rotation.dims // 2
    turns = torch.zeros((positions, head_dim))
    turns[:, :half] = 1.0
    if rotation is None:
        return turns
    frequencies = _frequencies(rotation)
    for first in range(0, positions, ROTATIONS_TOGETHER):
        rows = turns[first : first + ROTATIONS_TOGETHER]
        angles = torch.outer(torch.arange(first, first + len(rows), dtype=torch.float64), frequencies)
        rows[:, :turned] = angles.cos() * rotation.magnitude
        rows[:, half : half + turned] = angles.sin() * rotation.magnitude
    return turns


def temperature_table(temperature: Temperature, positions: int) -> torch.Tensor:
    """By how much the queries of every position are multiplied."""
    steps = torch.arange(positions, dtype=torch.float64).div(temperature.context).floor()
    return (1 + temperature.beta * torch.log1p(steps)).float()


def head_order(attention: AttentionSpec) -> list[int] | None:
    """Which dimension of a head comes at which place, so that pairs are half a head apart. None: they are."""
    rotation, dim = attention.rotation, attention.head_dim_k
    if rotation is None or (rotation.neox and rotation.dims == dim):
        return None
    assert not attention.v_is_k, "values cannot be in the order of keys"
    dims, rest = rotation.dims, list(range(rotation.dims, dim))
    pairs = [(i, i + dims // 2) if rotation.neox else (2 * i, 2 * i + 1) for i in range(dims // 2)]
    firsts, seconds = ([pair[which] for pair in pairs] for which in (0, 1))
    return firsts + rest[: len(rest) // 2] + seconds + rest[len(rest) // 2 :]


def reorder(rows: torch.Tensor, order: list[int]) -> None:
    """The rows of every head, in place."""
    stored = rows.view(torch.uint8) if rows.itemsize == 1 else rows
    heads = stored.view(-1, len(order), *stored.shape[1:])
    heads.copy_(heads[:, order])


def _frequencies(rotation: Rotation) -> torch.Tensor:
    """The angle by which each pair of dimensions turns from one position to the next, in float64."""
    pairs = torch.arange(0, rotation.dims, 2, dtype=torch.float64) / rotation.dims
    turns = rotation.base**-pairs / rotation.scale
    return turns if rotation.divisors is None else turns / torch.tensor(rotation.divisors, dtype=torch.float64)
