"""The tensors of a model: their names in files of both formats, their sizes, and what is in them.

A role is the name that llama.cpp's converter gives a tensor, and so is what is in it: readers of other files change
theirs. Matrices are [output, input]; norms are what is multiplied by (a model that adds one to them has it added).

    attn_q                        of a layer whose attention is gated: a head's query, its gate, the next head's query …
    attn_qkv      [conv, n_embd]  delta net: queries of all key heads, their keys, values of all value heads
    attn_gate     [v, n_embd]     … what the normalised output is gated by, after SiLU
    ssm_alpha     [v heads, …]    … how far the state decays; ssm_beta: how much of it is replaced, before the sigmoid
    ssm_in        [2 inner + 2 groups x state + heads, n_embd]   Mamba 2: gates, values, B, C, time steps
    ssm_conv1d    [conv, kernel]  the oldest input first; ssm_conv1d.bias [conv]: Mamba 2 alone. SiLU follows
    ssm_dt.bias   [heads]         added to alpha, or to the time step, before the softplus
    ssm_a         [heads]         -exp(A_log): what that is multiplied by; its exponential is the decay
    ssm_d         [heads]         Mamba 2: how much of a value passes by the state
    ssm_norm      [inner]         Mamba 2: of the gated output; delta net: [head_dim_v], of every head, before the gate
    ssm_out       [n_embd, inner]
    shortconv.in_proj [3 size, n_embd]: B, C, x; shortconv.conv [size, kernel]; shortconv.out_proj [n_embd, size]

The order of a delta net's value heads is the file's: `DeltaNetSpec.tiled` says which key head each goes with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.models.spec import (
    AttentionSpec,
    DeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    ModelSpec,
    RecurrenceSpec,
    ShortConvSpec,
)

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


_VECTORS = ("norm", ".bias", "attn_sinks", "layer_output_scale", "ssm_a", "ssm_d")


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
    n_embd = spec.n_embd
    mixes = layer.attention is not None or layer.recurrence is not None
    sizes = {"attn_norm.weight": (1, n_embd)} if mixes and layer.norms != "after" else {}
    if layer.attention is not None:
        sizes |= _attention_tensors(layer.attention, n_embd)
    if layer.recurrence is not None:
        sizes |= _recurrence_tensors(layer.recurrence, n_embd)
    if layer.feed_forward is not None:
        n_ff = layer.feed_forward.size
        sizes |= {"ffn_gate.weight": (n_ff, n_embd)} if layer.feed_forward.gated else {}
        sizes |= {"ffn_up.weight": (n_ff, n_embd), "ffn_down.weight": (n_embd, n_ff)}
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
    parts = {"q": attention.q_rows}
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


def _recurrence_tensors(each: RecurrenceSpec, n_embd: int) -> dict[str, tuple[int, int]]:
    if isinstance(each, ShortConvSpec):
        return {
            "shortconv.in_proj.weight": (3 * each.size, n_embd),
            "shortconv.conv.weight": (each.size, each.kernel),
            "shortconv.out_proj.weight": (n_embd, each.size),
        }
    assert isinstance(each, (DeltaNetSpec, Mamba2Spec)), "nothing is known of this state but its size"
    n_heads = each.n_heads if isinstance(each, Mamba2Spec) else each.n_v_heads
    sizes = {
        "ssm_conv1d.weight": (each.conv_size, each.kernel),
        "ssm_dt.bias": (1, n_heads),
        "ssm_a": (1, n_heads),
    }
    if isinstance(each, DeltaNetSpec):
        return sizes | {
            "attn_qkv.weight": (each.conv_size, n_embd),
            "attn_gate.weight": (each.v_size, n_embd),
            "ssm_alpha.weight": (n_heads, n_embd),
            "ssm_beta.weight": (n_heads, n_embd),
            "ssm_norm.weight": (1, each.head_dim_v),
            "ssm_out.weight": (n_embd, each.v_size),
        }
    return sizes | {
        "ssm_in.weight": (each.inner_size + each.conv_size + n_heads, n_embd),
        "ssm_conv1d.bias": (1, each.conv_size),
        "ssm_d": (1, n_heads),
        **({"ssm_norm.weight": (1, each.inner_size)} if each.norm else {}),
        "ssm_out.weight": (n_embd, each.inner_size),
    }


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
