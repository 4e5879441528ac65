"""The native engine computes what llama.cpp computes, on tiny models of every kind (the real one: test_native_text.py).

How far may two correct programs differ? They round at different places: llama.cpp rounds activations to f16 before it
multiplies them with f16 weights, to bf16 with bf16 weights, to 8 bits with quantised ones (in groups of 32 columns, or
of 256 for types of such blocks), and probabilities to f16. So tiny models are judged twice, by the RMS of the logits'
differences over the logits' standard deviation:

* against llama.cpp on the same file, by a limit per type;
* against the file's weights as F32 in llama.cpp, which has next to none of that rounding: the native engine may be half
  as far again from it as llama.cpp itself is on the quantised file.

No single logit may be off by more than 8 limits, so that one wrong row of a matrix is not lost in the mean (rounding
errors are near normal, and their largest of 20,000 is 4 to 5 RMS). `test_mistakes_are_beyond_the_limits` shows that the
usual mistakes (another RoPE, a missing bias, swapped heads, another epsilon ...) are beyond both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from cllm._native import instruction_sets
from cllm_bench.quality.llama import LlamaReference
from native_kit import ARCHITECTURES, WEIGHT_TYPES, Tensor, TinyModel, build_model, float_tensor
from step_kit import Floats, Rig, random_tokens

LIMITS = {"f32": 0.0005, "f16": 0.001, "bf16": 0.006}
"""Relative RMS of the differences from llama.cpp on the same file; for the quantised types see `limit_of`."""


def limit_of(weight_type: str) -> float:
    return LIMITS.get(weight_type, 0.03 if GGML_QUANT_SIZES[WEIGHT_TYPES[weight_type]][0] == 256 else 0.02)


def distance(logits: Floats, reference: Floats) -> tuple[float, float]:
    """RMS and largest of the differences, in standard deviations of the reference's logits."""
    difference = (logits - reference).astype(np.float64)
    return float(np.sqrt(np.mean(difference**2)) / reference.std()), float(np.abs(difference).max() / reference.std())


SHAPES: dict[str, dict[str, Any]] = {
    # heads:kv heads 1:1, 2:1, 4:1, 8:1, 3:1; odd vocabularies, so that the last tile of 16 rows is not full
    "head 64, 1:1": {"n_embd": 256, "n_heads": 4, "n_kv_heads": 4, "n_ff": 512, "n_vocab": 333},
    "head 128, 2:1": {"n_embd": 512, "n_heads": 4, "n_kv_heads": 2, "n_ff": 256, "n_vocab": 271, "tied": True},
    "head 80, 4:1": {"n_embd": 640, "n_heads": 8, "n_kv_heads": 2, "n_ff": 768, "n_vocab": 305},
    "head 96, 8:1": {"n_embd": 768, "n_heads": 8, "n_kv_heads": 1, "n_ff": 256, "n_vocab": 289, "tied": True},
    "head 64, 3:1": {"n_embd": 768, "n_heads": 12, "n_kv_heads": 4, "n_ff": 512, "n_vocab": 257},
}
COMMON: dict[str, Any] = {"n_layers": 2, "rms_eps": 0.1}
"""An epsilon that matters: activations here have a mean square of about 1."""


def every_type() -> list[Any]:
    """Every architecture with every weight type, over all shapes in turn."""
    shapes, found = list(SHAPES), []
    for a, arch in enumerate(ARCHITECTURES):
        for t, weight_type in enumerate(WEIGHT_TYPES):
            shape = shapes[(2 * a + t) % len(shapes)]
            options = {"arch": arch, "weight_type": weight_type, **SHAPES[shape]}
            found.append(pytest.param(options, id=f"{arch}, {weight_type}, {shape}"))
    return found


def every_shape() -> list[Any]:
    """Every shape in every architecture, with exact weights, for which the limit is narrowest."""
    return [
        pytest.param({"arch": arch, "weight_type": "f32", **options}, id=f"{arch}, f32, {shape}")
        for arch in ARCHITECTURES
        for shape, options in SHAPES.items()
    ]


SPECIAL: dict[str, dict[str, Any]] = {
    "llama 3 frequencies": {"rope_scaling": "llama3", "rope_base": 500000.0, **SHAPES["head 64, 3:1"]},
    "llama 3 frequencies, q4_1": {"rope_scaling": "llama3", "weight_type": "q4_1", **SHAPES["head 128, 2:1"]},
    "linear scaling, llama": {"rope_scaling": "linear", **SHAPES["head 64, 1:1"]},
    "linear scaling, qwen3": {"arch": "qwen3", "rope_scaling": "linear", **SHAPES["head 128, 2:1"]},
    "biases in llama": {"biases": True, **SHAPES["head 96, 8:1"]},
    "heads wider than the model": {"n_embd": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 128, "n_ff": 96},
    "heads narrower than the model": {"arch": "qwen3", "n_embd": 256, "n_heads": 2, "n_kv_heads": 1, "head_dim": 64},
    "one layer, one head": {"n_layers": 1, "n_embd": 64, "n_heads": 1, "n_kv_heads": 1, "n_ff": 32, "n_vocab": 17},
    "many layers": {"n_layers": 9},
    "mixed types": {
        "weight_type": "q4_k",
        "types": {"attn_v": "q6_k", "ffn_down": "q6_k", "token_embd": "q5_0", "output": "f16", "attn_k": "f32"},
        **SHAPES["head 64, 1:1"],
    },
    **{
        f"odd sizes, {kind}": {
            "weight_type": kind, "n_embd": 75, "n_heads": 3, "n_kv_heads": 1, "head_dim": 64, "n_ff": 133, "n_vocab": 71
        }
        for kind in ("f32", "f16", "bf16")
    },
}  # fmt: skip


def judge(
    model: TinyModel, weight_type: str, tmp_path: Path, sets: list[str], *, count: int = 48, block_size: int = 16
) -> None:
    path = model.write(tmp_path / "model.gguf")
    exact_path = as_floats(model).write(tmp_path / "exact.gguf")
    tokens = random_tokens(len(model.metadata["tokenizer.ggml.tokens"]), count, seed=7)
    reference, exact = (llama_logits(file, tokens) for file in (path, exact_path))
    limit = limit_of(weight_type)
    theirs, _ = distance(reference, exact)
    for name in sets:
        rig = Rig(path, instruction_set=name, blocks=-(-count // block_size), block_size=block_size)
        logits = rig.all_logits(tokens, rig.table(count))
        (error, worst), (ours, _) = distance(logits, reference), distance(logits, exact)
        found = (
            f"{name}: RMS {error:.5f}, largest {worst:.5f} (limit {limit}); from exact {ours:.5f}, theirs {theirs:.5f}"
        )
        print(found)
        assert error <= limit, found
        assert worst <= 8 * limit, found
        assert ours <= 1.5 * theirs + LIMITS["f32"], found


def llama_logits(path: Path, tokens: list[int]) -> Floats:
    with LlamaReference(path, context=-(-len(tokens) // 256) * 256, threads=1) as llama:
        return llama.logits(tokens)


def as_floats(model: TinyModel) -> TinyModel:
    """The same weights in F32."""
    return model.with_tensors({name: float_tensor(tensor.values()) for name, tensor in model.tensors.items()})


@pytest.mark.parametrize("options", every_type())
def test_every_architecture_and_weight_type(options: dict[str, Any], tmp_path: Path) -> None:
    judge(build_model(**COMMON, **options), options["weight_type"], tmp_path, instruction_sets())


@pytest.mark.parametrize("options", every_shape())
def test_every_head_size_and_grouping(options: dict[str, Any], tmp_path: Path) -> None:
    judge(build_model(**COMMON, **options), "f32", tmp_path, instruction_sets())


@pytest.mark.parametrize("options", SPECIAL.values(), ids=SPECIAL)
def test_special_cases(options: dict[str, Any], tmp_path: Path) -> None:
    judge(build_model(**(COMMON | options)), options.get("weight_type", "f32"), tmp_path, instruction_sets())


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_context_of_several_splits(block_size: int, tmp_path: Path) -> None:
    """Attention is computed in splits of some hundred positions, which are then put together."""
    options: dict[str, Any] = {"n_embd": 128, "n_heads": 2, "n_kv_heads": 1, "n_ff": 128}
    judge(build_model(**COMMON, **options), "f32", tmp_path, instruction_sets(), count=1300, block_size=block_size)


# --- are the limits narrow enough? ---


def change(model: TinyModel, name: str, changed: Callable[[Tensor], Tensor]) -> TinyModel:
    """Of a name in layers, those of all layers."""
    found = {key: changed(tensor) for key, tensor in model.tensors.items() if f".{key}".endswith(f".{name}")}
    assert found, f"there is no tensor {name}"
    return model.with_tensors(found)


def reorder(model: TinyModel, name: str, order: NDArray[np.int64]) -> TinyModel:
    return change(model, name, lambda tensor: Tensor(tensor.type, np.ascontiguousarray(tensor.raw[order])))


def constant(model: TinyModel, name: str, value: float) -> TinyModel:
    return change(model, name, lambda tensor: float_tensor(np.full(tensor.shape, value)))


def other_pairs(model: TinyModel) -> TinyModel:
    """What rotating (2i, 2i + 1) instead of (i, i + half) computes, or the other way round."""
    for letter, heads in (("q", 4), ("k", 2)):
        order = np.concatenate([64 * head + np.arange(64).reshape(2, 32).T.ravel() for head in range(heads)])
        model = reorder(model, f"attn_{letter}.weight", order)
    return model


def swapped_heads(model: TinyModel) -> TinyModel:
    order = np.arange(128).reshape(2, 64)[::-1].ravel()
    return reorder(reorder(model, "attn_k.weight", order), "attn_v.weight", order)


def swapped_gate(model: TinyModel) -> TinyModel:
    pairs = [(f"blk.{i}.ffn_gate.weight", f"blk.{i}.ffn_up.weight") for i in range(2)]
    swapped = {a: model.tensors[b] for a, b in pairs} | {b: model.tensors[a] for a, b in pairs}
    return model.with_tensors(swapped)


MISTAKES: dict[str, tuple[str, Callable[[TinyModel], TinyModel]]] = {
    "another epsilon": ("llama", lambda m: m.with_metadata(attention__layer_norm_rms_epsilon=1e-5)),
    "another rope base": ("qwen3", lambda m: m.with_metadata(rope__freq_base=20000.0)),
    "no frequency factors": ("llama", lambda m: m.with_tensors({"rope_freqs.weight": None})),
    "no linear scaling": ("qwen2", lambda m: m.with_metadata(rope__scaling__type=None, rope__scaling__factor=None)),
    "other rope pairs, llama": ("llama", other_pairs),
    "other rope pairs, qwen2": ("qwen2", other_pairs),
    "swapped kv heads": ("llama", swapped_heads),
    "no bias of queries": ("qwen2", lambda m: constant(m, "attn_q.bias", 0.0)),
    "no bias of keys": ("qwen2", lambda m: constant(m, "attn_k.bias", 0.0)),
    "no bias of values": ("qwen2", lambda m: constant(m, "attn_v.bias", 0.0)),
    "no norm of queries": ("qwen3", lambda m: constant(m, "attn_q_norm.weight", 1.0)),
    "no norm of keys": ("qwen3", lambda m: constant(m, "attn_k_norm.weight", 1.0)),
    "no weights in the attention's norm": ("llama", lambda m: constant(m, "attn_norm.weight", 1.0)),
    "no weights in the last norm": ("llama", lambda m: constant(m, "output_norm.weight", 1.0)),
    "gate and up swapped": ("llama", swapped_gate),
    "a wrong last row of the head": ("llama", lambda m: reorder(m, "output.weight", np.r_[0:332, 331])),
}


@pytest.mark.parametrize("weight_type", ["f32", "q8_0", "q4_k"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_beyond_the_limits(mistake: str, weight_type: str, tmp_path: Path) -> None:
    """llama.cpp on a file that is wrong in one thing computes what an engine with that mistake would."""
    arch, spoil = MISTAKES[mistake]
    scaling = "llama3" if arch == "llama" else "linear"
    options = SHAPES["head 64, 1:1"] | {"n_kv_heads": 2, "arch": arch, "rope_scaling": scaling}
    model = build_model(**COMMON, **options, weight_type=weight_type)
    tokens = random_tokens(333, 48, seed=7)
    right = llama_logits(model.write(tmp_path / "right.gguf"), tokens)
    wrong = llama_logits(spoil(model).write(tmp_path / "wrong.gguf"), tokens)
    error, worst = distance(wrong, right)
    limit = limit_of(weight_type)
    assert error > limit or worst > 8 * limit, f"RMS {error:.4f}, largest {worst:.4f}, limit {limit}"
