"""Hugging Face's model and what we read of its GGUF file agree, whatever the converter changed on the way.

The converter is llama.cpp's convert_hf_to_gguf.py. It comes with its package `conversion`; CLLM_CONVERTER names the
directory that has both, such as vendor/llama.cpp of the source of llama-cpp-python. Without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm.models.dequantise import DEQUANTISED
from cllm.models.features import FEATURES
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_decoder import unsupported_reason
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


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    network = tiny_network(*MODELS[name])
    network.save_pretrained(tmp_path / "hf")
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
                mean = 0.0 if weights.abs().max() == 0 else 1.0
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
