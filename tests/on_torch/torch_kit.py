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


def build(kind: str, seed: int = 0, **others: Any) -> Any:
    """A model of transformers in f32 whose weights are large enough for attention and biases to matter."""
    family, changes = MODELS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes | others))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
        if config.tie_word_embeddings:
            model.lm_head.weight.mul_(config.hidden_size**-0.5 * 4)
    return model


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
