"""Every architecture of GGUF files that we read: what a file says gives the logits that llama.cpp gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from architecture_kit import TINY, write_tiny
from cllm.backends.native.sizes import packed_bytes
from cllm.errors import ModelError
from cllm.models.architectures import ARCHITECTURES
from cllm.models.dequantise import DEQUANTISED
from cllm.models.features import FEATURES, features_of
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_decoder import decoder_spec, stored_tensors, unsupported_reason
from cllm.models.spec import ModelSpec
from cllm_bench.quality.llama import LlamaReference
from gguf_kit import with_keys
from plain_model import Floats, PlainModel
from states_kit import write_states_model

LENGTH = 80
"""Tokens: more than the windows, and than the context before it was made longer."""
TOKENS: list[int] = np.random.default_rng(1).integers(0, 97, LENGTH).tolist()
LIMIT = 1e-3


def test_every_architecture_has_a_model_here() -> None:
    assert {tiny.architecture for tiny in TINY.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", [name for name in TINY if name != "phi3, windows"])  # llama.cpp ignores those
def test_the_logits_of_llama_cpp(name: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", TINY[name])
    model = GGUFModel.open(path)
    assert unsupported_reason(model, DEQUANTISED, FEATURES) is None
    with LlamaReference(path, context=256, threads=1, kv_type="f32") as llama:
        expected = llama.logits(TOKENS)
    assert distance(PlainModel(model).logits(TOKENS), expected) < LIMIT


@pytest.mark.parametrize("architecture", [name for name, each in ARCHITECTURES.items() if each.recurrence])
def test_files_whose_tensors_llama_cpp_names(architecture: str, tmp_path: Path) -> None:
    """The logits of llama.cpp, from all tensors that it asks for."""
    optional = r"scale$|^cls|^dense_2|ffn_.*bias$|^rope_freqs|attn_output.bias$"  # which it does not all use
    path = write_states_model(tmp_path / "states.gguf", architecture, lacks=optional)
    model = GGUFModel.open(path)
    assert unsupported_reason(model, DEQUANTISED, FEATURES) is None
    with LlamaReference(path, context=256, threads=1, kv_type="f32") as llama:
        expected = llama.logits(TOKENS)
    assert distance(PlainModel(model).logits(TOKENS), expected) < LIMIT


def distance(found: Floats, expected: Floats) -> float:
    """RMS of the differences, in standard deviations."""
    return float(np.sqrt(np.mean(np.square(found - expected))) / expected.std())


# --- what a feature is for ---


def attention(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(
        spec, layers=tuple(replace(each, attention=replace(each.attention, **changes)) for each in spec.layers)
    )


def unscaled_rotation(spec: ModelSpec) -> ModelSpec:
    changed = (
        replace(each.attention, rotation=each.attention.rotation and replace(each.attention.rotation, magnitude=1.0))
        for each in spec.layers
    )
    return replace(spec, layers=tuple(replace(each, attention=a) for each, a in zip(spec.layers, changed, strict=True)))


def turned_alike(spec: ModelSpec) -> ModelSpec:
    return attention(rotation=spec.layers[0].attention.rotation)(spec)


def layers(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, layers=tuple(replace(each, **changes) for each in spec.layers))


def with_silu(spec: ModelSpec) -> ModelSpec:
    changed = (replace(each, feed_forward=replace(each.feed_forward, activation="silu")) for each in spec.layers)
    return replace(spec, layers=tuple(changed))


def model(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, **changes)


WITHOUT: dict[str, tuple[str, Callable[[ModelSpec], ModelSpec]]] = {
    "sliding windows": ("gemma3", attention(window=0)),
    "layers without positions": ("smollm3", turned_alike),
    "scaled rotations": ("mistral3, betas", unscaled_rotation),
    "norms behind the rotation": ("hunyuan-dense", attention(qk_norm_last=False)),
    "norms of values": ("gemma4", attention(v_norm=False)),
    "a scale of scores": ("granite", attention(scale=None)),
    "capped scores": ("gemma2, other caps", attention(softcap=0.0)),
    "temperature": ("mistral3", attention(temperature=None)),
    "norms of outputs": ("glm4", layers(norms="before")),
    "GELU": ("gemma", with_silu),
    "scaled layers": ("gemma4", layers(output_scale=False)),
    "a scale of embeddings": ("granite", model(embedding_scale=1.0)),
    "a scale of residuals": ("granite", model(residual_scale=1.0)),
    "a scale of logits": ("granite", model(logit_scale=1.0)),
    "capped logits": ("gemma2, other caps", model(logit_softcap=0.0)),
    "embeddings of layers": ("gemma4 E2B", model(layer_input_size=0)),
}
BY_THEIR_TENSORS = {
    "biases of outputs", "norms over all heads", "K/V of other layers", "values made from keys",
    "layers of different sizes", "gated attention", "ungated feed-forward", "layers of one part",
    "gated delta nets", "Mamba 2", "short convolutions",
}  # fmt: skip
"""Features without which the file's tensors could not be loaded."""


@pytest.mark.parametrize("feature", WITHOUT)
def test_without_a_feature_the_logits_are_others(feature: str, tmp_path: Path) -> None:
    """So the comparison with llama.cpp sees each of them."""
    name, change = WITHOUT[feature]
    plain = PlainModel(GGUFModel.open(write_tiny(tmp_path / "tiny.gguf", TINY[name])))
    assert feature in features_of(plain.spec)
    expected = plain.logits(TOKENS)
    plain.spec = change(plain.spec)
    assert feature not in features_of(plain.spec)
    assert distance(plain.logits(TOKENS), expected) > 20 * LIMIT


def test_every_feature_is_needed_by_a_model(tmp_path: Path) -> None:
    """All but sinks, which only models of experts have."""
    found: set[str] = set()
    for tiny in TINY.values():
        found.update(features_of(decoder_spec(GGUFModel.open(write_tiny(tmp_path / "tiny.gguf", tiny)))))
    assert found == set(FEATURES) - {"sinks"} == {*WITHOUT, *BY_THEIR_TENSORS}


# --- how files are read ---


def test_a_long_context_turns_keys_in_another_way(tmp_path: Path) -> None:
    """LongRoPE: as llama.cpp with such a context."""
    path = write_tiny(tmp_path / "tiny.gguf", TINY["phi3, short"])
    found = {context: PlainModel(GGUFModel.open(path), context).logits(TOKENS) for context in (256, 512)}
    assert distance(found[256], found[512]) > 20 * LIMIT
    for context, mine in found.items():
        with LlamaReference(path, context=context, threads=1, kv_type="f32") as llama:
            assert distance(mine, llama.logits(TOKENS)) < LIMIT


def test_fused_tensors_are_parts_of_one(tmp_path: Path) -> None:
    opened = GGUFModel.open(write_tiny(tmp_path / "tiny.gguf", TINY["glm4"]))
    found = {item.role: (item.name, item.first, item.shape) for item in stored_tensors(opened, decoder_spec(opened))}
    assert found["attn_q"] == ("blk.3.attn_qkv.weight", 0, (128, 64))
    assert found["attn_k"] == ("blk.3.attn_qkv.weight", 128, (64, 64))
    assert found["attn_v.bias"] == ("blk.3.attn_qkv.bias", 192, (64,))
    assert found["ffn_gate"] == ("blk.3.ffn_up.weight", 0, (96, 64))
    assert found["ffn_up"] == ("blk.3.ffn_up.weight", 96, (96, 64))


def test_equal_layers_are_one_object(tmp_path: Path) -> None:
    opened = GGUFModel.open(write_tiny(tmp_path / "tiny.gguf", TINY["gemma3 27B"]))
    assert len(set(map(id, decoder_spec(opened).layers))) == 2


def test_layers_that_share_keys_and_values_keep_none(tmp_path: Path) -> None:
    opened = GGUFModel.open(write_tiny(tmp_path / "tiny.gguf", TINY["gemma4 E2B"]))
    spec = decoder_spec(opened)
    assert [layer.attention.kv_from for layer in spec.layers] == [None, None, None, 1, 1, 2]
    sliding, full = 2 * 2 * 32 * 2, 1 * 2 * 64 * 2  # heads, keys and values, dimensions, bytes
    for each in (spec, opened.spec):
        assert each.kv_bytes_per_token("f16", "f16") == 2 * sliding + full


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gemma4", {"expert_count": 8}, "it is a mixture of experts"),
        ("exaone4", {"nextn_predict_layers": 1}, "its nextn_predict_layers is 1"),
        ("glm4", {"rope.dimension_sections": [4, 4, 4, 4]}, "its rope.dimension_sections is [4, 4, 4, 4]"),
        ("qwen3", {"attention.sliding_window": 16}, "its attention has a sliding window of 16 tokens"),
        ("gemma4", {"rope.dimension_count_swa": 31}, "its RoPE rotates 31 of 32 dimensions"),
        ("llama", {"attn_logit_softcapping": 30.0}, "its attn_logit_softcapping is 30.0"),
    ],
)
def test_what_cannot_run_is_named(name: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    tiny = replace(TINY[name], keys={**TINY[name].keys, **changes})
    reason = unsupported_reason(GGUFModel.open(write_tiny(tmp_path / "tiny.gguf", tiny)), DEQUANTISED, FEATURES)
    assert reason is not None and reason.startswith(said)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("qwen35", {"ssm.conv_kernel": None}, "the metadata key qwen35.ssm.conv_kernel is missing"),
        ("qwen35", {"ssm.group_count": 4}, "the metadata key qwen35.ssm.group_count is 4, which does not divide"),
        (
            "qwen35",
            {"ssm.time_step_rank": 10},
            "the metadata key qwen35.ssm.time_step_rank is 10, which does not divide",
        ),
        ("qwen35", {"rope.dimension_sections": None}, "qwen35.rope.dimension_sections is missing, not a list of 4"),
        ("qwen35", {"ssm.conv_kernel": 3}, "the tensor blk.0.ssm_conv1d.weight is 4 x 160, but should be 3 x 160"),
        ("qwen35", {"attention.recurrent_layers": [True] * 4}, "the tensor blk.3.ssm_conv1d.weight is missing"),
        ("lfm2", {"shortconv.l_cache": 65}, "the metadata key lfm2.shortconv.l_cache is 65, not up to 64 tokens"),
        ("lfm2", {"attention.head_count_kv": [0, 0, 0, 0]}, "the tensor blk.2.shortconv.in_proj.weight is missing"),
        (
            "nemotron_h",
            {"feed_forward_length": [0, 96, 0, 0, 65]},
            "the tensor blk.4.ffn_up.weight is 64 x 64, but should",
        ),
        ("mamba2", {"ssm.state_size": 17}, "the tensor blk.0.ssm_conv1d.weight is 4 x 192, but should be 4 x 196"),
        ("mamba2", {"block_count": 1000}, "has 39 tensors, too few for 1000 layers"),
        ("falcon-h1", {"ssm.time_step_rank": 8192}, "ssm.time_step_rank is 8192, which does not divide"),
    ],
)
def test_what_is_wrong_with_a_state_is_named(name: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    """As it is once the file is written."""
    path = write_tiny(tmp_path / "tiny.gguf", TINY[name])
    sound = GGUFModel.open(path)
    own = {f"{sound.spec.architecture}.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelError) as caught:
        wrong = GGUFModel.open(with_keys(path, tmp_path / "wrong.gguf", own))
        list(stored_tensors(wrong, decoder_spec(wrong)))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_layers_that_predict_further_tokens_are_left_aside(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", TINY["qwen35"])
    sound = GGUFModel.open(path)
    whole = PlainModel(sound)
    model = GGUFModel.open(with_keys(path, tmp_path / "more.gguf", {"qwen35.nextn_predict_layers": 1}))
    assert model.left_aside == 1 and model.spec.n_layers == 3
    assert unsupported_reason(model, DEQUANTISED, FEATURES) is None
    spec = decoder_spec(model)
    assert not [item for item in stored_tensors(model, spec) if item.layer == 3]
    whole.spec = replace(whole.spec, layers=whole.spec.layers[:3])
    assert np.array_equal(PlainModel(model).logits(TOKENS), whole.logits(TOKENS))
    assert packed_bytes(model) < packed_bytes(sound)


def test_the_order_of_a_delta_nets_heads_matters(tmp_path: Path) -> None:
    plain = PlainModel(GGUFModel.open(write_tiny(tmp_path / "tiny.gguf", TINY["qwen35"])))
    expected = plain.logits(TOKENS)
    changed = tuple(
        replace(layer, recurrence=layer.recurrence and replace(layer.recurrence, tiled=False))
        for layer in plain.spec.layers
    )
    plain.spec = replace(plain.spec, layers=changed)
    assert distance(plain.logits(TOKENS), expected) > 20 * LIMIT


def test_a_backend_without_features_is_told_which(tmp_path: Path) -> None:
    opened = GGUFModel.open(write_tiny(tmp_path / "tiny.gguf", TINY["smollm3"]))
    assert unsupported_reason(opened, DEQUANTISED) == "it needs what is not supported: layers without positions"
    assert unsupported_reason(opened, DEQUANTISED, {"layers without positions"}) is None
