"""The tensors of a model: their names in files of both formats, and their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.models.spec import AttentionSpec, LayerSpec, ModelSpec

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


_VECTORS = ("norm", ".bias", "attn_sinks", "layer_output_scale")


class TensorSpec(NamedTuple):
    """`name` is a GGUF file's; `role` is that without layer and ".weight". A vector has one row."""

    name: str
    layer: int
    role: str
    rows: int
    cols: int
    first: int = 0
    """Where it begins in the tensor of that name, if a file has several in one: a row, or a value of a vector."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.cols,) if self.role.endswith(_VECTORS) else (self.rows, self.cols)


def all_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    yield from outer_tensors(spec)
    for index, layer in enumerate(spec.layers):
        yield from layer_tensors(spec, layer, index)


def outer_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    """What belongs to no layer."""
    yield TensorSpec("token_embd.weight", -1, "token_embd", spec.n_vocab, spec.n_embd)
    yield TensorSpec("output_norm.weight", -1, "output_norm", 1, spec.n_embd)
    if not spec.tied:
        yield TensorSpec("output.weight", -1, "output", spec.n_vocab, spec.n_embd)
    if size := spec.layer_input_size:
        all_layers = spec.n_layers * size
        yield TensorSpec("per_layer_token_embd.weight", -1, "per_layer_token_embd", spec.n_vocab, all_layers)
        yield TensorSpec("per_layer_model_proj.weight", -1, "per_layer_model_proj", all_layers, spec.n_embd)
        yield TensorSpec("per_layer_proj_norm.weight", -1, "per_layer_proj_norm", 1, size)


def layer_tensors(spec: ModelSpec, layer: LayerSpec, index: int) -> Iterator[TensorSpec]:
    n_embd, n_ff = spec.n_embd, layer.feeds.size
    sizes = {"attn_norm.weight": (1, n_embd)} if layer.norms != "after" else {}
    sizes |= _attention_tensors(layer.attends, n_embd)
    sizes |= {"ffn_gate.weight": (n_ff, n_embd), "ffn_up.weight": (n_ff, n_embd), "ffn_down.weight": (n_embd, n_ff)}
    if layer.norms != "after":
        sizes["ffn_norm.weight"] = (1, n_embd)
    if layer.norms != "before":
        sizes["post_attention_norm.weight"] = sizes["post_ffw_norm.weight"] = (1, n_embd)
    if layer.output_scale:
        sizes["layer_output_scale.weight"] = (1, 1)
    if size := spec.layer_input_size:
        sizes |= {"inp_gate.weight": (size, n_embd), "proj.weight": (n_embd, size), "post_norm.weight": (1, n_embd)}
    for name, (rows, cols) in sizes.items():
        yield TensorSpec(f"blk.{index}.{name}", index, name.removesuffix(".weight"), rows, cols)


def _attention_tensors(attention: AttentionSpec, n_embd: int) -> dict[str, tuple[int, int]]:
    parts = {"q": attention.q_size}
    if attention.kv_from is None:
        parts["k"] = attention.k_size
        if not attention.v_is_k:
            parts["v"] = attention.v_size
    sizes = {f"attn_{part}.weight": (size, n_embd) for part, size in parts.items()}
    sizes["attn_output.weight"] = (n_embd, attention.output_size)
    if attention.qkv_bias:
        sizes |= {f"attn_{part}.bias": (1, size) for part, size in parts.items()}
    if attention.output_bias:
        sizes["attn_output.bias"] = (1, n_embd)
    if attention.qk_norm:
        for part in [part for part in parts if part != "v"]:
            size = attention.head_dim_k if attention.qk_norm == "head" else parts[part]
            sizes[f"attn_{part}_norm.weight"] = (1, size)
    if attention.sinks:
        sizes["attn_sinks.weight"] = (1, attention.n_heads)
    return sizes


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
