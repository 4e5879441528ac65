"""Weights packed for the kernels and read back are the weights of the file, as the package gguf reads it."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm._native import pack_roundtrip
from native_kit import WEIGHT_TYPES, Bytes, Floats, dequantized, random_matrix
from thorough import sampled

# Where a block holds the halves that scale its weights.
HALVES: dict[Type, tuple[int, ...]] = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.Q3_K: (108,),
    Type.Q2_K: (80, 82),
    Type.IQ3_S: (0,),
    Type.IQ3_XXS: (0,),
    Type.IQ2_S: (0,),
    Type.IQ2_XS: (0,),
    Type.IQ2_XXS: (0,),
}
LARGEST_EXPONENT = 252
"""Of MXFP4, that leaves twelve times the scale finite."""
FLOATS = {Type.F32: (np.uint32, 0x7F80_0000), Type.F16: (np.uint16, 0x7C00), Type.BF16: (np.uint16, 0x7F80)}

ALL_TYPES = pytest.mark.parametrize("kind", WEIGHT_TYPES.values(), ids=list(WEIGHT_TYPES))


def roundtrip(kind: Type, raw: Bytes) -> Floats:
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    rows, cols = raw.shape[0], raw.shape[1] // block_bytes * per_block
    return pack_roundtrip(int(kind), rows, cols, np.ascontiguousarray(raw).reshape(-1))


def any_blocks(rng: np.random.Generator, kind: Type, rows: int, blocks: int) -> Bytes:
    """Any bits, except that floats and scales are finite: subnormals, zeros, the largest, both signs."""
    block_bytes = GGML_QUANT_SIZES[kind][1]
    if kind in FLOATS:
        word, exponent = FLOATS[kind]
        words = rng.integers(0, np.iinfo(word).max, (rows, blocks), word, endpoint=True)
        words[words & word(exponent) == exponent] &= word(np.iinfo(word).max ^ exponent)
        return words.view(np.uint8)
    raw = rng.integers(0, 256, (rows * blocks, block_bytes), np.uint8)
    if kind is Type.MXFP4:
        raw[:, 0] %= LARGEST_EXPONENT + 1
    for offset in HALVES.get(kind, ()):
        halves = rng.integers(0, 0x7C00, rows * blocks, np.uint16) | rng.integers(0, 2, rows * blocks, np.uint16) << 15
        raw[:, offset : offset + 2] = halves.astype(np.uint16).reshape(-1, 1).view(np.uint8)
    return raw.reshape(rows, blocks * block_bytes)


def assert_same_weights(kind: Type, raw: Bytes) -> None:
    np.testing.assert_array_equal(roundtrip(kind, raw), dequantized(raw, kind))


@settings(max_examples=sampled(150), deadline=None)
@given(
    kind=st.sampled_from(list(WEIGHT_TYPES.values())),
    rows=st.integers(1, 50),
    blocks=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_finite_blocks_come_back(kind: Type, rows: int, blocks: int, seed: int) -> None:
    blocks = blocks if kind in FLOATS else blocks % 4 + 1
    assert_same_weights(kind, any_blocks(np.random.default_rng(seed), kind, rows, blocks))


@ALL_TYPES
def test_ordinary_weights_come_back(kind: Type) -> None:
    matrix = random_matrix(np.random.default_rng(1), 33, 512, kind, 0.02)
    assert matrix.type is kind
    assert_same_weights(kind, matrix.raw)
    assert 0.01 < roundtrip(kind, matrix.raw).std() < 0.04


@ALL_TYPES
@pytest.mark.parametrize("filling", [0x00, 0xFF, 0x80, 0x7F])
def test_extreme_quants_with_the_largest_scales_come_back(kind: Type, filling: int) -> None:
    if kind in FLOATS:
        raw = np.full((17, 4 * 5), filling & 0x7B, np.uint8)
    else:
        blocks = np.full((17 * 3, GGML_QUANT_SIZES[kind][1]), filling, np.uint8)
        if kind is Type.MXFP4:
            blocks[:, 0] = LARGEST_EXPONENT
        for offset in HALVES.get(kind, ()):
            blocks[:, offset : offset + 2] = np.float16(-65504).reshape(1).view(np.uint8)
        raw = blocks.reshape(17, -1)
    assert_same_weights(kind, raw)


@ALL_TYPES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_scale_or_weight_that_is_not_finite_is_found_anywhere(kind: Type, bad: float) -> None:
    rows, blocks = 19, 3
    block_bytes = GGML_QUANT_SIZES[kind][1]
    for row, block in ((0, 0), (15, 1), (18, 2)):
        for offset in HALVES.get(kind, (0,)):
            raw = any_blocks(np.random.default_rng(2), kind, rows, blocks).reshape(rows, blocks, block_bytes)
            raw[row, block, offset : offset + len(spelled(kind, bad))] = spelled(kind, bad)
            with pytest.raises(ValueError, match="finite"):
                roundtrip(kind, raw.reshape(rows, -1))


def spelled(kind: Type, value: float) -> Bytes:
    if kind is Type.F32:
        return np.float32(value).reshape(1).view(np.uint8)
    if kind is Type.MXFP4:
        return np.array([255 if np.isnan(value) else LARGEST_EXPONENT + 1], np.uint8)
    if kind is Type.BF16:
        return np.float32(value).reshape(1).view(np.uint8)[2:]
    return np.float16(value).reshape(1).view(np.uint8)


@pytest.mark.parametrize(
    ("kind", "rows", "cols", "size"),
    [
        (29, 1, 256, 56),  # IQ1_M, which is not read
        (-1, 1, 32, 128),
        (0, 0, 32, 0),
        (0, 1, 0, 0),
        (0, -1, 32, 128),
        (2, 1, 33, 18),
        (14, 1, 128, 105),
        (0, 2, 32, 128),
        (3, 2, 32, 39),
        (3, 2, 32, 41),
        (0, 2**62, 2**62, 16),
        (1, 2**31, 2**33, 16),
    ],
)
def test_sizes_that_do_not_fit_are_refused(kind: int, rows: int, cols: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        pack_roundtrip(kind, rows, cols, np.zeros(size, np.uint8))
