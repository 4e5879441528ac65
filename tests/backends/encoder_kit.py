"""Tiny models with random weights that embed texts or rank documents: BERT, as llama.cpp reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_kit import write_gguf

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "cat", "dog", "sat", "on", "mat", "who", "what", "is", "a", ".", "?"]
ENDS = ["ing", *"abcdefghijklmnopqrstuvwxyz"]
TOKENS = [*SPECIAL, *(f"\u2581{word}" for word in WORDS), *(f"\u2581{c}" for c in "bdefghijklm"), *ENDS]
CLS, SEP = 2, 3
POOLING = {"mean": 1, "cls": 2, "rank": 4}


def write_bert(path: Path, *, pooling: str = "mean", n_embd: int = 32, context: int = 64, seed: int = 0) -> Path:
    random = np.random.default_rng(seed)
    n_ff, n_layers = 64, 2

    def matrix(rows: int, cols: int, spread: float | None = None) -> NDArray[np.float32]:
        return random.normal(0, spread or cols**-0.5, (rows, cols)).astype(np.float32)

    def vector(size: int, middle: float = 0.0) -> NDArray[np.float32]:
        return (middle + random.normal(0, 0.1, size)).astype(np.float32)

    tensors: dict[str, NDArray[np.float32]] = {
        "token_embd.weight": matrix(len(TOKENS), n_embd, 1.0),
        "position_embd.weight": matrix(context, n_embd, 0.5),
        "token_types.weight": matrix(2, n_embd, 0.1),
        "token_embd_norm.weight": vector(n_embd, 1.0),
        "token_embd_norm.bias": vector(n_embd),
    }
    for layer in range(n_layers):
        at = f"blk.{layer}."
        for name, rows, cols in (
            *((f"attn_{part}", n_embd, n_embd) for part in ("q", "k", "v", "output")),
            ("ffn_up", n_ff, n_embd),
            ("ffn_down", n_embd, n_ff),
        ):
            tensors[f"{at}{name}.weight"], tensors[f"{at}{name}.bias"] = matrix(rows, cols), vector(rows)
        for name in ("attn_output_norm", "layer_output_norm"):
            tensors[f"{at}{name}.weight"], tensors[f"{at}{name}.bias"] = vector(n_embd, 1.0), vector(n_embd)
    if pooling == "rank":
        tensors["cls.weight"], tensors["cls.bias"] = matrix(n_embd, n_embd), vector(n_embd)
        tensors["cls.output.weight"], tensors["cls.output.bias"] = matrix(1, n_embd, 1.0), vector(1)
    metadata: dict[str, Any] = {
        "general.name": "tiny bert",
        "bert.block_count": n_layers,
        "bert.context_length": context,
        "bert.embedding_length": n_embd,
        "bert.feed_forward_length": n_ff,
        "bert.attention.head_count": 4,
        "bert.attention.layer_norm_epsilon": 1e-12,
        "bert.attention.causal": False,
        "bert.pooling_type": POOLING[pooling],
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.scores": [0.0] * len(TOKENS),
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": CLS,
        "tokenizer.ggml.cls_token_id": CLS,
        "tokenizer.ggml.seperator_token_id": SEP,
        "tokenizer.ggml.mask_token_id": 4,
    }
    return write_gguf(path, metadata, architecture="bert", tensors=tensors)
