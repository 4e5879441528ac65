"""Matrix products of quantised weights: the same bits on every instruction set that has fused operations, however many
inputs are multiplied together."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from cllm._native import instruction_sets, product
from native_kit import WEIGHT_TYPES, Floats, dequantized, random_matrix

QUANTISED = [kind for kind in WEIGHT_TYPES.values() if kind not in (Type.F32, Type.F16, Type.BF16)]
ALL_KINDS = pytest.mark.parametrize("kind", QUANTISED, ids=[kind.name for kind in QUANTISED])
FUSED = [name for name in instruction_sets() if name != "generic"]
COUNTS = (1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 31, 33, 48, 70)
ROWS = 37
"""Two tiles of outputs and a ragged one."""


def inputs_of(count: int, cols: int) -> Floats:
    """Ordinary ones, one row of zeros, and single values that are much larger than their neighbours."""
    rng = np.random.default_rng(3)
    found = rng.normal(size=(count, cols)).astype(np.float32)
    found[rng.random(found.shape) < 0.01] *= 20
    found[1:2] = 0
    return found


@ALL_KINDS
@pytest.mark.parametrize("cols", [256, 2304], ids=["few columns", "many columns"])
def test_bits_are_those_of_other_instruction_sets_and_counts(kind: Type, cols: int) -> None:
    matrix = random_matrix(np.random.default_rng(2), ROWS, cols, kind, 0.02)
    raw, inputs = np.ascontiguousarray(matrix.raw).reshape(-1), inputs_of(max(COUNTS), cols)
    alone = {
        name: np.concatenate([product(name, int(kind), ROWS, cols, raw, row[None]) for row in inputs])
        for name in instruction_sets()
    }
    for name in instruction_sets():
        for count in COUNTS:
            together = product(name, int(kind), ROWS, cols, raw, inputs[:count])
            np.testing.assert_array_equal(together, alone[name][:count], err_msg=f"{name}, {count} inputs")
    for name in FUSED:
        np.testing.assert_array_equal(alone[name], alone[FUSED[0]], err_msg=f"{name} and {FUSED[0]}")


@ALL_KINDS
@pytest.mark.parametrize("name", instruction_sets())
def test_products_are_near_those_of_floats(name: str, kind: Type) -> None:
    cols = 768
    matrix = random_matrix(np.random.default_rng(5), ROWS, cols, kind, 0.02)
    inputs = inputs_of(max(COUNTS), cols)
    found = product(name, int(kind), ROWS, cols, np.ascontiguousarray(matrix.raw).reshape(-1), inputs)
    exact = inputs.astype(np.float64) @ dequantized(matrix.raw, kind).astype(np.float64).T
    # An input's rounding is at most half a step of 1/127 of the largest of its group, and errors add up as random ones do.
    assert np.abs(found - exact).max() < 0.02 * exact.std() + 1e-6
    assert not found[1].any()


def test_inputs_of_another_length_are_refused() -> None:
    raw = np.zeros(18, np.uint8)
    with pytest.raises(ValueError, match="another length"):
        product("generic", int(Type.Q4_0), 1, 32, raw, np.zeros((1, 64), np.float32))
    with pytest.raises(ValueError, match="but this CPU runs"):
        product("sse9", int(Type.Q4_0), 1, 32, raw, np.zeros((1, 32), np.float32))
