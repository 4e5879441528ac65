"""Directories of models some of whose layers carry a state: what we read of them gives transformers' logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cllm.backends.torch.sources import open_source
from cllm.errors import ModelError
from cllm.models.hf_directory import HFModel
from plain_model import PlainModel
from torch_kit import STATES, Floats, build, build_seeing, random_tokens, save

TOKENS = random_tokens(70)


def read(path: Path) -> PlainModel:
    model = HFModel.open(path)
    weights: dict[tuple[int, str], Floats] = {}
    with open_source(model) as source:
        for item in source.tensors(model.spec):
            weights[item.layer, item.role] = np.concatenate([piece.float().numpy() for piece in source.pieces(item)])
    return PlainModel.of(model.spec, weights)


@pytest.mark.parametrize("kind", STATES)
def test_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    network = build(kind)
    with torch.no_grad():
        expected = network(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    plain = read(save(network, tmp_path))
    assert plain.spec.recurrent
    assert expected.std() > 0.1, "a model that says nothing would agree with anything"
    assert np.abs(plain.logits(TOKENS) - expected).max() < 1e-4 * max(1.0, expected.std())


def test_every_tensor_of_every_kind_is_asked_for(tmp_path: Path) -> None:
    """And what is not there, or is there beside it, is named."""
    path = save(build("qwen3.5"), tmp_path)
    index = json.loads((path / "config.json").read_text())
    change(path, **index | {"linear_conv_kernel_dim": 3})
    with pytest.raises(
        ModelError, match=r"layers\.0\.linear_attn\.conv1d\.weight is .* x 1 x 4, but should be .* x 1 x 3"
    ):
        read(path)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a layer of experts": (
        "nemotron h",
        {"layers_block_type": ["linear_attention", "moe"], "num_hidden_layers": 2},
        "layers_block_type .* 'moe', a mixture of experts is not supported",
    ),
    "experts": ("granite hybrid", {"num_local_experts": 8}, "num_local_experts is 8, which is not supported"),
    "unknown layers": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv", "other"]},
        "layer_types .* 'other' is not supported",
    ),
    "too few layers": ("lfm2", {"layer_types": ["conv"]}, "layer_types is .*, not what each of num_hidden_layers"),
    "biases of convolutions": ("lfm2", {"conv_bias": True}, "conv_bias is .*, which is not supported"),
    "no biases of convolutions": ("mamba2", {"use_conv_bias": False}, "use_conv_bias is .*, which is not supported"),
    "groups": ("mamba2", {"n_groups": 3}, "n_groups is 3, not a divisor of num_heads, 8"),
    "key heads": (
        "qwen3.5",
        {"linear_num_key_heads": 4},
        "linear_num_key_heads is 4, not a divisor of linear_num_value_heads, 6",
    ),
    "no gates": ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate is .*, which is not supported"),
    "norms before gates": ("falcon h1 norms", {"mamba_norm_before_gate": True}, "but only norms behind the gate"),
    "limits": ("bamba", {"time_step_limit": [0.0, 1.0]}, "time_step_limit is .*, but only time steps without limits"),
    "an activation": ("nemotron h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is .*, but only relu2 is supported"),
    "missing layers": (
        "granite hybrid",
        {"layer_types": None},
        "layer_types is None, not a list of what each layer is",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_is_named(case: str, tmp_path: Path) -> None:
    kind, changes, said = WRONG[case]
    path = save(build(kind), tmp_path)
    change(path, **changes)
    with pytest.raises(ModelError, match=said):
        read(path)


def test_of_a_model_of_images_the_text_part_is_read_and_further_layers_are_left_aside(tmp_path: Path) -> None:
    network = build_seeing("Qwen3_5")
    with torch.no_grad():
        expected = network(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    path = save(network, tmp_path)
    assert HFModel.open(path).left_aside == 0
    tensors = load_file(path / "model.safetensors")
    tensors |= {"mtp.fc.weight": torch.zeros(64, 128), "mtp.layers.0.input_layernorm.weight": torch.zeros(64)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    change(path, text_config=config["text_config"] | {"mtp_num_hidden_layers": 1})
    assert HFModel.open(path).left_aside == 1
    assert np.abs(read(path).logits(TOKENS) - expected).max() < 1e-4 * max(1.0, expected.std())


def test_further_layers_of_a_model_of_text_are_left_aside(tmp_path: Path) -> None:
    path = save(build("qwen3.5"), tmp_path)
    expected = read(path).logits(TOKENS)
    tensors = load_file(path / "model.safetensors") | {"mtp.layers.0.input_layernorm.weight": torch.zeros(64)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert np.array_equal(read(path).logits(TOKENS), expected)
    tensors["model.other.weight"] = torch.zeros(64)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"the tensor model\.other\.weight is unknown for this kind of model"):
        read(path)


def test_a_configuration_that_claims_more_than_there_is(tmp_path: Path) -> None:
    path = save(build("mamba2"), tmp_path)
    for changes, said in (
        ({"num_hidden_layers": 1 << 15}, "tensors, too few for 32768 layers"),
        ({"num_heads": 1 << 30}, "num_heads is 1073741824, not a size of up to 4096"),
        ({"conv_kernel": 1 << 30}, "conv_kernel is 1073741824, not a size of up to 64"),
    ):
        before = (path / "config.json").read_text()
        change(path, **changes)
        with pytest.raises(ModelError, match=said):
            read(path)
        (path / "config.json").write_text(before)


def test_older_names_of_layers(tmp_path: Path) -> None:
    """Configurations from before transformers 5 call the same layers otherwise."""
    older: dict[str, dict[str, Any]] = {
        "granite hybrid": {"layer_types": ["mamba", "attention", "mamba"]},
        "nemotron h": {"layers_block_type": None, "hybrid_override_pattern": "M-*-M", "num_hidden_layers": 5},
        "lfm2": {"layer_types": None, "full_attn_idxs": [1], "block_ff_dim": 128, "intermediate_size": None},
        "qwen3.5": {"layer_types": None, "full_attention_interval": 4},
        "bamba": {"mamba_d_head": "auto"},
    }
    for kind, changes in older.items():
        path = save(build(kind), tmp_path / kind)
        expected = HFModel.open(path).spec
        change(path, **changes)
        assert HFModel.open(path).spec == expected


def change(path: Path, **changes: Any) -> None:
    """Keys of the configuration; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
