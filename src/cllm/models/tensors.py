"""The tensors of a model: their names in files of both formats, and their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.models.spec import LayerSpec, ModelSpec

HF_EMBEDDING, HF_NORM, HF_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class TensorSpec(NamedTuple):
    """`name` is a GGUF file's; `role` is that without layer and ".weight". A vector has one row."""

    name: str
    layer: int
    role: str
    rows: int
    cols: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.cols,) if self.role.endswith(("norm", ".bias")) else (self.rows, self.cols)


def all_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    yield from outer_tensors(spec)
    for index, layer in enumerate(spec.layers):
        yield from layer_tensors(layer, spec.n_embd, index)


def outer_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    """What belongs to no layer."""
    yield TensorSpec("token_embd.weight", -1, "token_embd", spec.n_vocab, spec.n_embd)
    yield TensorSpec("output_norm.weight", -1, "output_norm", 1, spec.n_embd)
    if not spec.tied:
        yield TensorSpec("output.weight", -1, "output", spec.n_vocab, spec.n_embd)


def layer_tensors(layer: LayerSpec, n_embd: int, index: int) -> Iterator[TensorSpec]:
    attention, n_ff = layer.attention, layer.feed_forward.size
    sizes = {
        "attn_norm.weight": (1, n_embd),
        "attn_q.weight": (attention.q_size, n_embd),
        "attn_k.weight": (attention.k_size, n_embd),
        "attn_v.weight": (attention.v_size, n_embd),
        "attn_output.weight": (n_embd, attention.output_size),
        "ffn_norm.weight": (1, n_embd),
        "ffn_gate.weight": (n_ff, n_embd),
        "ffn_up.weight": (n_ff, n_embd),
        "ffn_down.weight": (n_embd, n_ff),
    }
    if attention.qkv_bias:
        sizes["attn_q.bias"] = (1, attention.q_size)
        sizes["attn_k.bias"] = (1, attention.k_size)
        sizes["attn_v.bias"] = (1, attention.v_size)
    if attention.output_bias:
        sizes["attn_output.bias"] = (1, n_embd)
    if attention.qk_norm:
        sizes["attn_q_norm.weight"] = sizes["attn_k_norm.weight"] = (1, attention.head_dim_k)
    for name, (rows, cols) in sizes.items():
        yield TensorSpec(f"blk.{index}.{name}", index, name.removesuffix(".weight"), rows, cols)


def hf_name(name: str) -> str:
    """The name that a Hugging Face model has for a tensor of a plain decoder's GGUF file."""
    *layer, role, kind = name.removeprefix("blk.").split(".")
    place = f"model.layers.{layer[0]}." if layer else ""
    return f"{place}{_HF_NAMES[role]}.{kind}"


def in_halves(rows: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Queries' or keys' rows in Hugging Face's order: dimensions that are rotated together, which are neighbours in
    GGUF files of the architecture llama, are half a head apart."""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)
