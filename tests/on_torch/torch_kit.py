"""Small random models of every architecture, as transformers makes and saves them, and steps through them by hand."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from cllm.backends.base import Chunk
from cllm.backends.torch.backend import TorchBackend
from cllm.kv.ops import BlockGeometry
from cllm.models.hf_directory import HFModel
from hf_kit import byte_tokenizer
from step_of import rows_of

Floats = NDArray[np.float32]
BLOCK = 16
N_VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": N_VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 6, "long_factor": [1.0, 1.1, 1.4, 2.0, 3.0, 5.0],
}  # fmt: skip
SLIDING = {"sliding_window": 24, "num_hidden_layers": 4}
GEMMA: dict[str, Any] = SLIDING | {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
GEMMA4: dict[str, Any] = GEMMA | {
    "global_head_dim": 64, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 20.0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama biases": ("Llama", {"attention_bias": True}),
    "llama one KV head": ("Llama", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "num_key_value_heads": 4}),
}
"""Plain decoders."""
RICH: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral window": ("Mistral", SLIDING),
    "mistral3": ("Ministral3", {"head_dim": 32, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}}),
    "qwen3 yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "qwen2 window": (
        "Qwen2",
        SLIDING | {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "gemma2": ("Gemma2", GEMMA | {"query_pre_attn_scalar": 40, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", GEMMA | {"num_hidden_layers": 7, "query_pre_attn_scalar": 48}),
    "gemma3 linear": (
        "Gemma3Text",
        GEMMA
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma4": ("Gemma4Text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4 E": (
        "Gemma4Text",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": N_VOCAB, "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 24}),
    "phi3 longrope": (
        "Phi3", {"rope_parameters": LONG | {"partial_rotary_factor": 0.75}, "original_max_position_embeddings": 16},
    ),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", SLIDING),
    "exaone4": ("Exaone4", SLIDING | {"sliding_window_pattern": 4}),
    "exaone4 full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "glm4": ("Glm4", {"head_dim": 32}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 32}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 32, "rope_parameters": {
        "rope_type": "dynamic", "alpha": 10.0, "rope_theta": 1e4, "factor": 1.0}}),
    "seed_oss": ("SeedOss", {"head_dim": 32}),
}  # fmt: skip
"""Decoders with more: layers that differ, windows, caps, norms and scales."""
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16,
}  # fmt: skip
BACKBONE: dict[str, Any] = {"n_groups": 2, "layer_norm_epsilon": 1e-5, "chunk_size": 16}
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": (
        "Qwen3_5Text",
        {
            "num_hidden_layers": 5, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
    ),
    "qwen3.5 listed": (
        "Qwen3_5Text",
        {
            "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 32, "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "norm_eps": 1e-5,
            "block_multiple_of": 32, "tie_word_embeddings": True,
        },
    ),
    "granite hybrid": (
        "GraniteMoeHybrid",
        MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 0,
            "num_experts_per_tok": 0, "shared_intermediate_size": 96, "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4,
        },
    ),
    "granite hybrid rope": (
        "GraniteMoeHybrid",
        MAMBA
        | {
            "layer_types": ["full_attention", "linear_attention", "full_attention"], "num_local_experts": 0,
            "num_experts_per_tok": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope",
        },
    ),
    "nemotron h": (
        "NemotronH",
        BACKBONE
        | {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
            "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "head_dim": 32, "time_step_min": 1e-30,
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
    "bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1], "head_dim": 16}),
    "mamba2": ("Mamba2", BACKBONE | {"num_heads": 8, "head_dim": 16, "state_size": 16}),
}  # fmt: skip
"""Models some of whose layers carry a state."""


def build(kind: str, seed: int = 0, **others: Any) -> Any:
    """A model of transformers in f32 whose weights are large enough for attention and biases to matter."""
    family, changes = (MODELS | RICH | STATES)[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes | others))
    family = family.removesuffix("Text")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    return randomised(model, config)


def randomised(model: Any, config: Any) -> Any:
    adds_one = config.model_type in ("gemma2", "gemma3_text", "qwen3_5_text")
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[1] ** -0.5)
            elif parameter.dim() == 3:  # convolutions
                parameter.normal_(0, 0.6)
            else:
                around_0 = name.endswith("bias") or (adds_one and not name.endswith("linear_attn.norm.weight"))
                parameter.normal_(0.0 if around_0 else 1.0, 0.2)
            if config.model_type == "gemma4_text" and name.endswith("q_norm.weight"):
                parameter.mul_(0.15)  # its scores are not divided: attention to one token alone would magnify rounding
        if config.tie_word_embeddings:
            model.lm_head.weight.mul_(config.hidden_size**-0.5 * 4)
    return model


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
SEEING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Gemma3": ("gemma3", "Gemma3Text", {"vision_config": VISION | {"model_type": "siglip_vision_model"}}),
    "Mistral3": ("mistral3", "Ministral3", {"vision_config": VISION | {"model_type": "pixtral", "head_dim": 8}}),
    "Gemma4": ("gemma4 E", "Gemma4Text", {"vision_config": None, "audio_config": None}),
}
"""Models of text and images, each with the kind and the class of its text part."""


SEEING_WITH_STATES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3_5": (
        "qwen3.5",
        "Qwen3_5Text",
        {
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 64,
            }
        },
    ),
}


def build_seeing(family: str) -> Any:
    kind, text, others = (SEEING | SEEING_WITH_STATES)[family]
    torch.manual_seed(0)
    changes = SIZES | (RICH | STATES)[kind][1] | {"pad_token_id": 0}
    config = getattr(transformers, f"{text}Config")(**changes)
    tied = config.tie_word_embeddings
    whole = getattr(transformers, f"{family}Config")(text_config=config.to_dict(), tie_word_embeddings=tied, **others)
    return randomised(getattr(transformers, f"{family}ForConditionalGeneration")(whole).eval().float(), config)


def save(model: Any, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    return path


def save_whole(model: Any, path: Path) -> Path:
    """With a tokenizer and a chat template."""
    save(model, path)
    (path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    return path


def open_backend(path: Path, *, blocks: int = 64, kv_type: str = "f32", **options: Any) -> TorchBackend:
    backend = TorchBackend(HFModel.open(path), device="cpu", kv_type=kv_type, threads=1, **options)
    backend.allocate(BlockGeometry(blocks, BLOCK))
    return backend


def chunk(tokens: Sequence[int], start: int, blocks: Sequence[int], *, wants: bool = True) -> Chunk:
    return Chunk(array("i", tokens), start, wants, blocks=list(blocks))


def table(length: int, first: int = 0) -> list[int]:
    return list(range(first, first - (-length // BLOCK)))


def all_logits(backend: TorchBackend, tokens: Sequence[int]) -> Floats:
    """Of every position: all K and V first, then each position once more by itself."""
    blocks = table(len(tokens))
    rows_of(backend, [chunk(tokens, 0, blocks, wants=False)])
    return rows_of(backend, [chunk([token], at, blocks) for at, token in enumerate(tokens)])


def in_chunks(backend: TorchBackend, tokens: Sequence[int], size: int) -> Floats:
    """The logits of the last one."""
    blocks = table(len(tokens))[::-1]
    for start in range(0, len(tokens), size):
        rows = rows_of(backend, [chunk(tokens[start : start + size], start, blocks)])
    return rows[0].copy()


def greedy(backend: TorchBackend, prompt: Sequence[int], count: int) -> list[int]:
    tokens, blocks = list(prompt), table(len(prompt) + count)
    done = 0
    while len(tokens) < len(prompt) + count:
        row = rows_of(backend, [chunk(tokens[done:], done, blocks)])[0]
        done = len(tokens)
        tokens.append(int(row.argmax()))
    return tokens[len(prompt) :]


def random_tokens(count: int, seed: int = 0) -> list[int]:
    values: Any = np.random.default_rng(seed).integers(2, N_VOCAB, count)
    return list(map(int, values))
