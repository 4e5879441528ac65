"""Hugging Face directories: what is read of them, and what is refused, each time with one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cllm.errors import ModelError
from cllm.models.hf_directory import HFModel
from cllm.models.spec import AttentionSpec, ModelSpec, Rotation
from cllm.models.unchanged_file import UnchangedFile
from hf_kit import CONFIG, header_of, tensors, write_directory, write_safetensors


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        HFModel.open(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


# -- config.json ---------------------------------------------------------------------------------------------------


def test_a_directory_is_a_model(tmp_path: Path) -> None:
    model = HFModel.open(write_directory(tmp_path / "tiny"))
    spec, attention = model.spec, model.spec.layers[0].attention
    assert (model.name, spec.architecture, spec.n_layers, attention.head_dim_k) == ("tiny", "llama", 2, 8)
    assert (spec.n_vocab, spec.context_length, spec.layers[1].feed_forward.size) == (300, 256, 48)
    assert not spec.tied and not attention.qkv_bias and not attention.qk_norm
    assert attention.rotation == Rotation(10000.0, 8, neox=True)
    assert model.tensors["lm_head.weight"].shape == (300, 32)


def test_what_the_architectures_mean(tmp_path: Path) -> None:
    def spec(name: str, **changes: Any) -> ModelSpec:
        return HFModel.open(write_directory(tmp_path, config={"architectures": [name], **changes})).spec

    def attention(name: str, **changes: Any) -> AttentionSpec:
        return spec(name, **changes).layers[0].attention

    qwen2 = attention("Qwen2ForCausalLM", sliding_window=128, use_sliding_window=False)
    assert qwen2.qkv_bias and not qwen2.output_bias and not qwen2.qk_norm
    assert attention("Qwen3ForCausalLM").qk_norm
    assert attention("LlamaForCausalLM", attention_bias=True).output_bias
    assert spec("MistralForCausalLM", sliding_window=4096).tied is False
    assert spec("LlamaForCausalLM", tie_word_embeddings=None).tied is False  # there is a head
    headless = {name: size for name, size in tensors().items() if name != "lm_head.weight"}
    directory = write_directory(tmp_path / "headless", config={"tie_word_embeddings": None}, shapes=headless)
    assert HFModel.open(directory).spec.tied is True


def layers_of(path: Path, name: str, **changes: Any) -> list[AttentionSpec]:
    config = {"architectures": [name], "num_hidden_layers": 6, **changes}
    return [layer.attention for layer in HFModel.open(write_directory(path, config=config)).spec.layers]


def test_which_layers_have_a_window_and_how_they_turn(tmp_path: Path) -> None:
    """As older files say it, without a list of layers."""
    gemma = {"sliding_window": 64, "hidden_act": "gelu_pytorch_tanh", "rope_scaling": {"type": "linear", "factor": 8.0}}
    gemma3 = layers_of(tmp_path, "Gemma3ForCausalLM", query_pre_attn_scalar=64, head_dim=8, **gemma)
    assert [each.window for each in gemma3] == [64] * 5 + [0] and gemma3[0].scale == 0.125
    rotations = [each.rotation for each in gemma3]
    assert rotations[0] == Rotation(1e4, 8, neox=True) and rotations[5] == Rotation(1e6, 8, neox=True, scale=8.0)
    assert [each.window for each in layers_of(tmp_path, "Gemma2ForCausalLM", **gemma)] == [64, 0] * 3
    exaone = layers_of(tmp_path, "Exaone4ForCausalLM", sliding_window=64)
    assert [each.window for each in exaone] == [64, 64, 64, 0, 64, 64]
    assert [each.rotation is None for each in exaone] == [not each.window for each in exaone]
    assert [each.rotation is None for each in layers_of(tmp_path, "SmolLM3ForCausalLM")] == [0, 0, 0, 1, 0, 0]
    wide = layers_of(tmp_path, "MistralForCausalLM", sliding_window=256)  # no text is longer
    assert [each.window for each in wide] == [0] * 6
    long = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    (rotation, *_) = (each.rotation for each in layers_of(tmp_path, "Phi3ForCausalLM", rope_scaling=long))
    assert rotation is not None and rotation.divisors == (1.0,) * 4  # trained for all of its context
    long["original_max_position_embeddings"] = 64
    (rotation, *_) = (each.rotation for each in layers_of(tmp_path, "Phi3ForCausalLM", rope_scaling=long))
    assert rotation is not None and rotation.divisors == (1.0, 2.0, 3.0, 4.0) and rotation.magnitude > 1


def test_gemma_4_as_its_first_files_say_it(tmp_path: Path) -> None:
    changes = {"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "sliding_window": 64}
    shared = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention"] * 3 * 2}
    shared["layer_types"][2] = shared["layer_types"][5] = "full_attention"
    layers = layers_of(tmp_path, "Gemma4ForCausalLM", head_dim=8, hidden_act="gelu_pytorch_tanh", **changes, **shared)
    assert [(each.head_dim_k, each.n_kv_heads, each.v_is_k) for each in layers] == [
        *[(8, 2, False)] * 2, (16, 1, True), *[(8, 2, False)] * 2, (16, 1, True)
    ]  # fmt: skip
    assert [each.kv_from for each in layers] == [None] * 4 + [3, 2]
    assert layers[2].rotation is not None and layers[2].rotation.divisors == (1.0, 1.0, *[float("inf")] * 6)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_as_older_and_newer_files_write_it(key: str, tmp_path: Path) -> None:
    def read(**rope: Any) -> Rotation:
        config = {"rope_theta": 500.0, key: rope}
        rotation = HFModel.open(write_directory(tmp_path, config=config)).spec.layers[0].attention.rotation
        assert rotation is not None
        return rotation

    stretched = read(
        rope_type="llama3", factor=8.0, low_freq_factor=1, high_freq_factor=4.0, original_max_position_embeddings=64
    )
    assert stretched.base == 500.0 and stretched.divisors is not None
    fastest, *_, slowest = stretched.divisors
    assert (fastest, slowest) == (1.0, 8.0)
    assert read(type="linear", factor=4.0).scale == 4.0
    assert read(rope_type="default", rope_theta=1e6).base == 1e6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architectures is ['GemmaForCausalLM'], not one of LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rope_scaling.rope_type is 'ntk', but only default"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"architectures": ["Cohere2ForCausalLM"]}, "architectures is ['Cohere2ForCausalLM'], not one of"),
        ({"architectures": ["Gemma4ForCausalLM"], "enable_moe_block": True}, "enable_moe_block is True"),
        ({"architectures": ["Ernie4_5ForCausalLM"], "use_bias": True}, "use_bias is True"),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}}, "text_config is {}, not one of"),
        ({"architectures": ["Olmo3ForCausalLM"], "sliding_window": 9, "layer_types": ["full"]}, "layer_types is"),
        ({"attention_multiplier": 0.5}, "attention_multiplier is 0.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', not a valid size"),
        ({"hidden_size": True}, "hidden_size is True, not a valid size"),
        ({"hidden_size": 2**40}, "not a valid size"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, not a positive number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', not true or false"),
        ({"rope_scaling": [1]}, "rope_scaling is [1], not an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
    ],
)
def test_what_is_not_done_or_not_right_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    message = refusal(write_directory(tmp_path, config=changes))
    assert said in message and message.split("; ")[-1].startswith(("download the model again", "use another model"))


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes"])
def test_weights_that_are_stored_quantised_are_refused_by_name(method: str, tmp_path: Path) -> None:
    message = refusal(write_directory(tmp_path, config={"quantization_config": {"quant_method": method, "bits": 4}}))
    assert f"its weights are quantised as '{method}' (quantization_config), which is not supported" in message
    assert message.endswith("or a .gguf file")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"[]", "contains [], not an object"),
        (b"\xff", "is not UTF-8 text"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b" " * (1 << 21), "is larger than 1024 KiB"),
    ],
)
def test_configurations_that_are_none(text: bytes, said: str, tmp_path: Path) -> None:
    (write_directory(tmp_path) / "config.json").write_bytes(text)
    assert said in refusal(tmp_path)


def test_a_directory_without_configuration(tmp_path: Path) -> None:
    assert "has no config.json" in refusal(tmp_path)


def test_numbers_without_end(tmp_path: Path) -> None:
    text = json.dumps(CONFIG).replace("1e-05", "NaN")
    (write_directory(tmp_path) / "config.json").write_text(text)
    assert "rms_norm_eps is nan" in refusal(tmp_path)


# -- safetensors ---------------------------------------------------------------------------------------------------


def with_entry(name: str, **changes: Any) -> dict[str, Any]:
    header = header_of(tensors())
    header[name] = {**header[name], **changes}
    return header


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (b"{", 0, "is not valid JSON"),
        (b"[]", 0, "not an object"),
        (json.dumps(header_of(tensors())).encode(), 100, "the file at"),
        ({"a": 5}, 0, "the entry of the tensor 'a' is 5"),
        (with_entry(NORM, dtype="F4"), None, "has the unknown type 'F4'"),
        (with_entry(NORM, shape=[-1]), None, "has the shape [-1]"),
        (with_entry(NORM, shape=[True]), None, "has the shape [True]"),
        (with_entry(NORM, shape=[2**61, 2**61]), None, "but needs"),
        (with_entry(NORM, shape=[33]), None, "but needs 132 bytes"),
        (with_entry(NORM, data_offsets=[0, 128]), None, "begins at byte"),
        (with_entry(NORM, data_offsets=[128, 0]), None, "has the offsets [128, 0]"),
        (with_entry(NORM, data_offsets="all"), None, "has the offsets 'all'"),
    ],
)
def test_damaged_weights(header: Any, data: int | None, said: str, tmp_path: Path) -> None:
    path = write_directory(tmp_path)
    if isinstance(header, dict) and data is None:
        data = 32 * 4 + 2 * 300 * 32 * 4 + 2 * 4 * (64 + 2 * 1024 + 2 * 512 + 3 * 1536)
    write_safetensors(path / "model.safetensors", header, data)
    message = refusal(path)
    assert said in message and "download the model again" in message


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_files_that_end_in_their_header(size: int, tmp_path: Path) -> None:
    path = write_directory(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "less than its header" in refusal(tmp_path)


def test_a_header_that_claims_everything(tmp_path: Path) -> None:
    path = write_directory(tmp_path) / "model.safetensors"
    with path.open("r+b") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # a hole: nothing is written
    assert "its header claims 200000000 bytes" in refusal(tmp_path)


def split(path: Path) -> dict[str, Any]:
    """The same weights in two parts; the index that names them."""
    path = write_directory(path)
    (path / "model.safetensors").unlink()
    shapes = tensors()
    parts = {f"model-{n}-of-2.safetensors": dict(list(shapes.items())[n::2]) for n in range(2)}
    for part, inside in parts.items():
        write_safetensors(path / part, header_of(inside))
    return {"weight_map": {name: part for part, inside in parts.items() for name in inside}}


def write_index(path: Path, index: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_weights_in_parts(tmp_path: Path) -> None:
    write_index(tmp_path, split(tmp_path))
    model = HFModel.open(tmp_path)
    assert model.tensors.keys() == tensors().keys() and len(model.stamps) == 2


@pytest.mark.parametrize(
    "part",
    ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..\\m.safetensors", "model.bin", "", 5, None,
     "c:m.safetensors", "a\0.safetensors"],
)  # fmt: skip
def test_an_index_stays_in_its_directory(part: Any, tmp_path: Path) -> None:
    index = split(tmp_path)
    index["weight_map"][NORM] = part
    write_index(tmp_path, index)
    assert "which is not a file of this directory" in refusal(tmp_path)


def test_indexes_that_are_wrong(tmp_path: Path) -> None:
    index = split(tmp_path)
    write_index(tmp_path, {"weight_map": []})
    assert "weight_map is []" in refusal(tmp_path)
    write_index(tmp_path, index | {"weight_map": index["weight_map"] | {"more": "model-0-of-2.safetensors"}})
    assert "has no tensor 'more'" in refusal(tmp_path)
    write_index(tmp_path, {"weight_map": {"more": "model-7-of-2.safetensors"}})
    assert "model-7-of-2.safetensors: cannot be read" in refusal(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (write_directory(tmp_path) / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert ".bin files are not supported" in refusal(tmp_path)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    model = HFModel.open(write_directory(tmp_path))
    ((path, stamp),) = model.stamps.items()
    with (
        pytest.raises(ModelError, match=r"changed while it was being loaded \(it had \d+ bytes and has 100\)"),
        UnchangedFile(path, stamp, "try again") as file,
    ):
        os.truncate(path, 100)
        with pytest.raises(ModelError, match="was truncated while it was being loaded, inside the tensor x"):
            file.read_bytes(50, 100, "the tensor x")
    with pytest.raises(ModelError, match="changed while"), UnchangedFile(path, stamp, "try again"):
        pass


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_scaling",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention"),
        ({"rope_parameters": {}, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
    ],
)
def test_no_kind_of_rope_is_passed_over(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=named):
        HFModel.open(write_directory(tmp_path, config=settings))


def test_a_pipe_in_a_files_place_is_refused(tmp_path: Path) -> None:
    path = write_directory(tmp_path)
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")
    with pytest.raises(ModelError, match="not a regular file"):
        HFModel.open(path)
