"""Random weights as GGUF stores them: blocks of every type, of a wanted size of values. Needs numpy alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Random = np.random.Generator

_UNIFORM = 12**0.5
"""Evenly drawn numbers reach over so many of their standard deviations."""


@dataclass(frozen=True, slots=True)
class BlockType:
    number: int
    """GGML's."""
    weights: int
    """In a block."""
    bytes: int
    draw: Callable[[Random, int, float], Bytes]
    """So many blocks, of values with a mean of about 0 and about this standard deviation."""

    def size(self, rows: int, columns: int) -> int:
        """Bytes of a matrix."""
        return rows * (columns // self.weights) * self.bytes


def _halves(values: NDArray[np.float64]) -> Bytes:
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _scales(random: Random, count: int, middle: float) -> NDArray[np.float64]:
    """Not all the same, so that one taken for its neighbour is seen."""
    return middle * random.uniform(0.8, 1.2, count)


def _random_bytes(random: Random, count: int, each: int) -> Bytes:
    return random.integers(0, 256, (count, each), np.uint8)


def _f32(random: Random, count: int, spread: float) -> Bytes:
    return (spread * random.standard_normal((count, 1), np.float32)).view(np.uint8)


def _f16(random: Random, count: int, spread: float) -> Bytes:
    return (spread * random.standard_normal((count, 1), np.float32)).astype(np.float16).view(np.uint8)


def _bf16(random: Random, count: int, spread: float) -> Bytes:
    """The upper half of a float32, cut off."""
    return np.ascontiguousarray(_f32(random, count, spread)[:, 2:])


def _around_zero(quants: int, levels: int) -> Callable[[Random, int, float], Bytes]:
    """A scale and quants around the middle of `levels`. The scale has either sign: quants lean to the negative side."""

    def draw(random: Random, count: int, spread: float) -> Bytes:
        scales = _scales(random, count, spread * _UNIFORM / levels) * random.choice((-1.0, 1.0), count)
        return np.concatenate([_halves(scales), _random_bytes(random, count, quants)], axis=1)

    return draw


def _above_least(quants: int, levels: int) -> Callable[[Random, int, float], Bytes]:
    """A scale, the least value, and quants from 0 on."""

    def draw(random: Random, count: int, spread: float) -> Bytes:
        scales = _scales(random, count, spread * _UNIFORM / levels)
        least = -scales * (levels - 1) / 2
        return np.concatenate([_halves(scales), _halves(least), _random_bytes(random, count, quants)], axis=1)

    return draw


def _scales_and_minima(quants: int, levels: int) -> Callable[[Random, int, float], Bytes]:
    """Heads of blocks of 256 weights: d, dmin, 8 pairs of 6-bit scale and minimum; values have their middle near 0."""

    def draw(random: Random, count: int, spread: float) -> Bytes:
        scales = random.integers(20, 64, (count, 8), np.uint8)
        minima = np.clip(scales.astype(np.int16) + random.integers(-3, 4, (count, 8)), 0, 63).astype(np.uint8)
        d = _scales(random, count, spread * _UNIFORM / (42 * levels))
        packed = [
            scales[:, :4] | (scales[:, 4:] >> 4 << 6),
            minima[:, :4] | (minima[:, 4:] >> 4 << 6),
            (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4),
        ]
        heads = [_halves(d), _halves(d * (levels - 1) / 2)]
        return np.concatenate([*heads, *packed, _random_bytes(random, count, quants)], axis=1)

    return draw


def _q6_k(random: Random, count: int, spread: float) -> Bytes:
    scales = (random.integers(30, 128, (count, 16)) * random.choice((-1, 1), (count, 16))).astype(np.int8)
    d = _scales(random, count, spread * _UNIFORM / (79 * 64))
    return np.concatenate([_random_bytes(random, count, 128 + 64), scales.view(np.uint8), _halves(d)], axis=1)


BLOCK_TYPES = {
    "f32": BlockType(0, 1, 4, _f32),
    "f16": BlockType(1, 1, 2, _f16),
    "bf16": BlockType(30, 1, 2, _bf16),
    "q4_0": BlockType(2, 32, 18, _around_zero(16, 16)),
    "q4_1": BlockType(3, 32, 20, _above_least(16, 16)),
    "q5_0": BlockType(6, 32, 22, _around_zero(20, 32)),
    "q5_1": BlockType(7, 32, 24, _above_least(20, 32)),
    "q8_0": BlockType(8, 32, 34, _around_zero(32, 256)),
    "q4_k": BlockType(12, 256, 144, _scales_and_minima(128, 16)),
    "q5_k": BlockType(13, 256, 176, _scales_and_minima(32 + 128, 32)),
    "q6_k": BlockType(14, 256, 210, _q6_k),
}
_FALLBACKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def fitting(name: str, columns: int) -> str:
    """The type that rows of so many columns get: as llama.cpp chooses where they are no whole number of blocks."""
    for candidate in (name, _FALLBACKS.get(name, name), "f16"):
        if columns % BLOCK_TYPES[candidate].weights == 0:
            return candidate
    raise AssertionError("f16 fits every row")
