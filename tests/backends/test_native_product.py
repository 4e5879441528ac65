"""Matrix products of quantised weights: the same bits on every instruction set that has fused operations, however many
inputs are multiplied together."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES

from cllm._native import instruction_sets, product
from cllm.config.backend import InstructionSet
from native_kit import WEIGHT_TYPES, Floats, build_model, dequantized, random_matrix
from step_kit import Rig, random_tokens

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


SMALL_BLOCKS = [kind for kind in QUANTISED if GGML_QUANT_SIZES[kind][0] == 32]
KINDS_AND_COLUMNS = [
    *((kind, cols) for kind in QUANTISED for cols in (256, 2304)),
    *((kind, cols) for kind in SMALL_BLOCKS for cols in (544, 576)),
]
"""Few and many columns; where blocks are small, also a few more than kernels take at a time."""


@pytest.mark.parametrize(("kind", "cols"), KINDS_AND_COLUMNS, ids=[f"{k.name} {cols}" for k, cols in KINDS_AND_COLUMNS])
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
def test_bits_are_the_same_with_more_inputs_than_kernels_take_at_a_time(name: str, kind: Type) -> None:
    count, cols, pieces = 530, 512, 70
    raw = np.ascontiguousarray(random_matrix(np.random.default_rng(4), ROWS, cols, kind, 0.02).raw).reshape(-1)
    inputs = inputs_of(count, cols)
    together = product(name, int(kind), ROWS, cols, raw, inputs)
    apart = [product(name, int(kind), ROWS, cols, raw, inputs[at : at + pieces]) for at in range(0, count, pieces)]
    np.testing.assert_array_equal(together, np.concatenate(apart))


def rounded(inputs: Floats) -> Floats:
    """What the engine takes inputs for: whole numbers of steps, 127 of which are the largest of 32 columns."""
    groups = inputs.reshape(len(inputs), -1, 32)
    peaks = np.abs(groups).max(axis=2, keepdims=True)
    factors = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=peaks > 0)
    return (np.rint(groups * factors) * (peaks / np.float32(127))).reshape(inputs.shape)


@ALL_KINDS
@pytest.mark.parametrize("name", instruction_sets())
def test_products_are_those_of_dequantised_weights(name: str, kind: Type) -> None:
    cols = 768
    matrix = random_matrix(np.random.default_rng(5), ROWS, cols, kind, 0.02)
    inputs = inputs_of(max(COUNTS), cols)
    found = product(name, int(kind), ROWS, cols, np.ascontiguousarray(matrix.raw).reshape(-1), inputs)
    exact = rounded(inputs).astype(np.float64) @ dequantized(matrix.raw, kind).astype(np.float64).T
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5 * exact.std())
    assert not found[1].any()


def test_inputs_of_another_length_are_refused() -> None:
    raw = np.zeros(18, np.uint8)
    with pytest.raises(ValueError, match="another length"):
        product("generic", int(Type.Q4_0), 1, 32, raw, np.zeros((1, 64), np.float32))
    with pytest.raises(ValueError, match="but this CPU runs"):
        product("sse9", int(Type.Q4_0), 1, 32, raw, np.zeros((1, 32), np.float32))


def test_instruction_sets_are_those_of_the_setting_and_of_the_cpu_the_best_first() -> None:
    found = instruction_sets()
    assert found == [name for name in get_args(InstructionSet) if name in found]
    assert found[-1] == "generic"
    cpu = Path("/proc/cpuinfo")
    if cpu.is_file() and platform.machine() == "x86_64":
        flags = set(cpu.read_text().split())
        needed = {"amx": "amx_int8", "avx512": "avx512_vnni", "avxvnni": "avx_vnni", "avx2": "avx2"}
        assert {needed[name] for name in found if name != "generic"} <= flags


@pytest.mark.parametrize(("name", "like"), [("amx", "avx512"), ("avxvnni", "avx2")])
def test_steps_are_those_of_the_set_that_only_multiplies_otherwise(name: str, like: str, tmp_path: Path) -> None:
    if not {name, like} <= set(instruction_sets()):
        pytest.skip(f"this CPU does not run {name}")
    path = build_model(weight_type="q4_k", n_embd=256, n_heads=4, n_kv_heads=2, head_dim=64, n_ff=512).write(
        tmp_path / "model.gguf"
    )
    found = []
    for chosen in (name, like):
        rig = Rig(path, instruction_set=chosen, threads=3)
        tokens = random_tokens(rig.n_vocab, 70, seed=1)
        found.append(rig.all_logits(tokens, rig.table(len(tokens))))
    np.testing.assert_array_equal(*found)
