"""Hugging Face's model and what we read of its GGUF file agree, whatever the converter changed on the way.

The converter is llama.cpp's convert_hf_to_gguf.py. It comes with its package `conversion`; CLLM_CONVERTER names the
directory that has both, such as vendor/llama.cpp of the source of llama-cpp-python. Without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm.models.dequantise import DEQUANTISED
from cllm.models.features import FEATURES
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_decoder import unsupported_reason
from cllm.models.hf_directory import HFModel
from cllm.models.spec import DeltaNetSpec
from cllm.models.tensors import in_halves
from plain_model import PlainModel

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PLACE = os.environ.get("CLLM_CONVERTER", "")
pytestmark = pytest.mark.skipif(not PLACE, reason="CLLM_CONVERTER does not say where convert_hf_to_gguf.py is")

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
}  # fmt: skip
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 16,
    "num_hidden_layers": 6,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 97,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "llama, biases": ("Llama", {"attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3, yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3Text", {**GEMMA, "num_hidden_layers": 7}),
    "gemma4": (
        "Gemma4Text",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4 E2B": (
        "Gemma4Text",
        {**GEMMA4, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    ),
    "mistral3": (
        "Ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "phi3": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "phi3, windows": (
        "Phi3",
        {
            "sliding_window": 16,
            "rope_parameters": {
                "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "rope_type": "default",
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 5.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1},
    ),
    "smollm3": ("SmolLM3", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 16,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {**YARN, "attention_factor": 1.2, "beta_fast": 32, "beta_slow": 1},
            },
        },
    ),
    "exaone4": (
        "Exaone4",
        {"sliding_window": 16, "sliding_window_pattern": 4, "rope_parameters": LLAMA3},
    ),
    "exaone4 without windows": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4, "rope_parameters": LLAMA3},
    ),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": True}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 32}),
    "hunyuan-dense": (
        "HunYuanDenseV1",
        {
            "head_dim": 32,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0},
        },
    ),
    "seed_oss": ("SeedOss", {"head_dim": 32, "attention_bias": True}),
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": (
        "Qwen3_5Text",
        {
            "rms_norm_eps": 1e-6,  # as in every file: transformers always adds that to the length of queries and keys
            "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"], "norm_eps": 1e-3, "block_multiple_of": 32,
            "tie_word_embeddings": True,
        },
    ),
    "granite hybrid": (
        "GraniteMoeHybrid",
        MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96,
            "attention_multiplier": 0.1, "embedding_multiplier": 3.0, "logits_scaling": 5.0,
            "residual_multiplier": 0.4,
        },
    ),
    "nemotron h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "head_dim": 32,
            "time_step_min": 1e-30, "layer_norm_epsilon": 1e-3,
        },
    ),
    "falcon h1": (
        "FalconH1",
        MAMBA
        | {
            "mamba_d_ssm": 128, "head_dim": 32, "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.6,
            "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7], "attention_in_multiplier": 1.2, "ssm_in_multiplier": 0.9,
            "attention_out_multiplier": 0.8, "ssm_out_multiplier": 1.4, "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
    ),
    "falcon h1 norms": (
        "FalconH1",
        MAMBA | {"mamba_d_ssm": 128, "head_dim": 16, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "mamba2": (
        "Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "layer_norm_epsilon": 1e-3},
    ),
}  # fmt: skip
"""Models some of whose layers carry a state."""
OLDER: dict[str, dict[str, Any]] = {
    "granite hybrid": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "nemotron h": {
        "layers_block_type": None,
        "hybrid_override_pattern": "M-*M",
        "num_experts_per_tok": None,
        "n_routed_experts": None,
        "num_hidden_layers": 4,
        "model_type": "older",
    },
    "mamba2": {"intermediate_size": None, "num_attention_heads": None},
    "qwen3.5": {"mtp_num_hidden_layers": 1},
}
"""What the converter wants to find in a configuration: names from before transformers 5."""


@pytest.mark.parametrize("name", MODELS | STATES)
def test_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    network = tiny_network(*(MODELS | STATES)[name])
    network.save_pretrained(tmp_path / "hf")
    change(tmp_path / "hf" / "config.json", OLDER.get(name, {}))
    path = convert(tmp_path / "hf", tmp_path / "model.gguf")
    tokens = np.random.default_rng(1).integers(1, 97, 80).tolist()
    with torch.inference_mode():
        expected = network(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    model = GGUFModel.open(path)
    assert unsupported_reason(model, DEQUANTISED | {0, 1, 30}, FEATURES) is None
    found = PlainModel(model).logits(tokens)
    distance = np.sqrt(np.mean(np.square(found - expected))) / expected.std()
    print(name, distance)
    assert distance < 1e-3


@pytest.mark.parametrize("name", STATES)
def test_weights_are_those_of_the_directory(name: str, tmp_path: Path) -> None:
    """Whichever of the two formats a model is in, an engine gets the same."""
    from cllm.backends.torch.sources import open_source

    tiny_network(*STATES[name]).save_pretrained(tmp_path / "hf")
    change(tmp_path / "hf" / "config.json", OLDER.get(name, {}))
    converted = PlainModel(GGUFModel.open(convert(tmp_path / "hf", tmp_path / "model.gguf")))
    directory = HFModel.open(tmp_path / "hf")
    with open_source(directory) as source:
        items = list(source.tensors(directory.spec))
        own = {
            (item.layer, item.role): np.concatenate([piece.float().numpy() for piece in source.pieces(item)])
            for item in items
        }
    assert own.keys() == converted.weights.keys()
    scales = {"token_embd": directory.spec.embedding_scale, "output": directory.spec.logit_scale}
    for (layer, role), values in converted.weights.items():
        found, expected = own[layer, role], values
        if (recurrence := directory.spec.layers[layer].recurrence) is not None:
            assert recurrence == replace_tiled(converted.spec.layers[layer].recurrence)
        if isinstance(recurrence, DeltaNetSpec):
            found = tiled(recurrence, role, found)
        if converted.spec.architecture in ("granitehybrid", "nemotron_h") and role in ("attn_q", "attn_k"):
            expected = in_halves(expected, converted.spec.layers[layer].attends.head_dim_k)
        if directory.spec.architecture == "falcon-h1":
            found = found * np.float32(scales.get(role, 1.0))
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=f"{layer} {role}")


def replace_tiled(recurrence: Any) -> Any:
    return replace(recurrence, tiled=False) if isinstance(recurrence, DeltaNetSpec) else recurrence


def tiled(spec: DeltaNetSpec, role: str, values: Any) -> Any:
    """A delta net's tensor with the value heads in the converter's order: the first of every key head, the second …"""
    heads = np.arange(spec.n_v_heads).reshape(spec.n_k_heads, -1).T.ravel()
    rows = (heads[:, None] * spec.head_dim_v + np.arange(spec.head_dim_v)).ravel()
    if role in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt.bias"):
        return values[heads]
    if role == "attn_gate":
        return values[rows]
    if role in ("attn_qkv", "ssm_conv1d"):
        return np.concatenate((values[: 2 * spec.k_size], values[2 * spec.k_size :][rows]))
    return values[:, rows] if role == "ssm_out" else values


def change(path: Path, changes: dict[str, Any]) -> None:
    """Keys of a configuration; None removes one."""
    config = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({key: value for key, value in config.items() if key not in changes or value is not None})
    )


def tiny_network(kind: str, changes: dict[str, Any]) -> Any:
    """With weights large enough that every part of it matters."""
    config = getattr(transformers, f"{kind}Config")(**(COMMON | changes))
    network_class = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    network = network_class(config).float().eval()
    with torch.no_grad():
        for name, weights in network.named_parameters():
            if "norm" in name:
                mean = 0.0 if weights.abs().max() == 0 else 1.0  # those to which one is added begin with 0
                weights.copy_(mean + 0.3 * torch.randn_like(weights))
            elif weights.ndim == 2:
                spread = 1.0 if "embed" in name else 1.2 / weights.shape[1] ** 0.5
                weights.copy_(spread * torch.randn_like(weights))
            else:
                weights.copy_(0.3 * torch.randn_like(weights))
        for name, values in network.named_buffers():
            if "layer_scalar" in name:
                values.copy_(torch.rand_like(values) + 0.5)
    return network


def convert(directory: Path, path: Path) -> Path:
    """In a process of its own: the converter needs its own version of the package gguf."""
    words = {"model": {"vocab": list(range(97))}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(words))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((f"{PLACE}/gguf-py", PLACE))}
    command = [sys.executable, "-c", CONVERT, directory, path]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


CONVERT = """
import sys
from pathlib import Path
import gguf, torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

directory, path = map(Path, sys.argv[1:])
fields = ModelBase.load_hparams(directory, False)
kind = get_model_class(get_model_architecture(fields, ModelType.TEXT), mmproj=False)

def without_words():
    writer.gguf_writer.add_tokenizer_model("no_vocab")
    writer.gguf_writer.add_vocab_size(97)

with torch.inference_mode():
    writer = kind(directory, gguf.LlamaFileType.ALL_F32, path)
    writer = getattr(writer, "impl", writer)
    writer.set_vocab = without_words
    writer.write()
"""
