"""What a decoder is, in numbers: the models of one family differ in nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ROTATIONS_TOGETHER = 4096


@dataclass(frozen=True, slots=True)
class Decoder:
    """Llama, Qwen 2 or Qwen 3. Heads are rotated in halves: dimension i together with i + head_dim / 2."""

    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int
    rms_eps: float
    rope_base: float
    context_length: int
    rope_scale: float = 1.0
    """Positions are divided by this."""
    rope_divisors: tuple[float, ...] | None = None
    """By how much the turning of each pair of dimensions is slowed down beside that."""
    qkv_bias: bool = False
    head_norm: bool = False
    """Whether the queries and keys of every head are normalised."""
    output_bias: bool = False
    """Whether what attention gives has a bias, too."""
    tied: bool = False
    """Whether the head is the embedding."""

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    def frequencies(self) -> torch.Tensor:
        """The angle by which each pair of dimensions turns from one position to the next, in float64."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        turns = self.rope_base**-pairs / self.rope_scale
        return turns if self.rope_divisors is None else turns / torch.tensor(self.rope_divisors, dtype=torch.float64)

    def rotations(self, positions: int) -> torch.Tensor:
        """[positions, head_dim]: the cosines of every pair of dimensions, then the sines."""
        frequencies, half = self.frequencies(), self.head_dim // 2
        turns = torch.empty((positions, self.head_dim))
        for first in range(0, positions, ROTATIONS_TOGETHER):
            rows = turns[first : first + ROTATIONS_TOGETHER]
            angles = torch.outer(torch.arange(first, first + len(rows), dtype=torch.float64), frequencies)
            rows[:, :half], rows[:, half:] = angles.cos(), angles.sin()
        return turns


def llama3_divisors(
    rope_base: float, head_dim: int, *, factor: float, low: float, high: float, trained: int
) -> tuple[float, ...]:
    """Llama 3's way to a longer context than it was trained for at first: pairs that go round less than `low` times in
    that are slowed down by `factor`, those that do more than `high` times are not, and those between in part."""
    turns = rope_base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    rounds = trained * turns / (2 * math.pi)
    fast = ((rounds - low) / (high - low)).clamp(0.0, 1.0)
    return tuple((1.0 / (fast + (1.0 - fast) / factor)).tolist())
