"""Shapes of models whose layers differ, as llama.cpp's converter writes their files.

The numbers are those of the published configurations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Sizes = Mapping[str, tuple[int, int]]
"""Rows and columns of matrices, by role."""


class Vector(NamedTuple):
    """What no file quantises: drawn evenly from `low` to `high`."""

    name: str
    shape: tuple[int, ...]
    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True, slots=True)
class LayeredShape:
    architecture: str
    n_embd: int
    n_vocab: int
    keys: Mapping[str, Any]
    """Metadata, by what follows the architecture in a key's name."""
    layers: Sequence[Sizes]
    """The matrices of each."""
    vectors: Sequence[Vector]
    outer: Sizes = field(default_factory=dict)
    """Matrices that belong to no layer, beside the embedding, which is the head, too."""


def gemma3(
    *,
    n_layers: int,
    n_embd: int,
    n_heads: int,
    n_kv_heads: int,
    n_ff: int,
    window: int,
    n_vocab: int = 262144,
) -> LayeredShape:
    """Five layers with a window, then one without; heads of 256, queries and keys normalised, norms on both sides."""
    head = 256
    keys = {
        "context_length": 131072,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": window,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    layer = _attention(n_embd, n_heads, n_kv_heads, head) | _feed_forward(n_embd, n_ff)
    vectors = [_norm("output_norm", n_embd)]
    for index in range(n_layers):
        vectors += _sandwich(index, n_embd) + _query_norms(index, head)
    return LayeredShape("gemma3", n_embd, n_vocab, keys, [layer] * n_layers, vectors)


def gemma4(
    *,
    n_layers: int,
    n_embd: int,
    n_heads: int,
    n_kv_heads: int,
    n_ff: int,
    window: int,
    shared: int,
    per_layer: int,
    n_vocab: int = 262144,
) -> LayeredShape:
    """Gemma 3's layers, with heads of 512 where all is seen; the last `shared` layers use K and V of earlier ones, and
    every layer gets `per_layer` values of each token from an embedding of its own."""
    head, head_swa = 512, 256
    slides = [index % 6 != 5 for index in range(n_layers)]
    keys = {
        "context_length": 131072,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.key_length_swa": head_swa,
        "attention.value_length_swa": head_swa,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": per_layer,
        "final_logit_softcapping": 30.0,
        "rope.dimension_count": head,
        "rope.dimension_count_swa": head_swa,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }
    layers = []
    freqs = Vector("rope_freqs.weight", (head // 2,), 1.0, 8.0)
    vectors = [_norm("output_norm", n_embd), _norm("per_layer_proj_norm", per_layer), freqs]
    for index, sliding in enumerate(slides):
        own, size = index < n_layers - shared, head_swa if sliding else head
        attention = _attention(n_embd, n_heads, n_kv_heads, size)
        if not own:
            attention = {role: sizes for role, sizes in attention.items() if role not in ("attn_k", "attn_v")}
        inputs = {"inp_gate": (per_layer, n_embd), "proj": (n_embd, per_layer)}
        layers.append(attention | _feed_forward(n_embd, n_ff) | inputs)
        scaled = _query_norms(index, size, size**-0.25)  # for nothing else scales the scores
        vectors += _sandwich(index, n_embd) + (scaled if own else scaled[:1])
        vectors += [_norm(f"blk.{index}.post_norm", n_embd), Vector(f"blk.{index}.layer_output_scale.weight", (1,))]
    outer = {
        "per_layer_token_embd": (n_vocab, n_layers * per_layer),
        "per_layer_model_proj": (n_layers * per_layer, n_embd),
    }
    return LayeredShape("gemma4", n_embd, n_vocab, keys, layers, vectors, outer)


def qwen35(
    *,
    n_layers: int,
    n_embd: int,
    n_heads: int,
    n_kv_heads: int,
    n_ff: int,
    key_heads: int,
    value_heads: int,
    n_vocab: int = 248320,
) -> LayeredShape:
    """Three layers of the gated delta rule with heads of 128, then one of gated attention with heads of 256."""
    head, state, kernel, interval = 256, 128, 4, 4
    inner, channels = value_heads * state, (2 * key_heads + value_heads) * state
    keys = {
        "context_length": 262144,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "full_attention_interval": interval,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "rope.freq_base": 1e7,
        "ssm.conv_kernel": kernel,
        "ssm.state_size": state,
        "ssm.group_count": key_heads,
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": inner,
    }
    recurrence = {
        "attn_qkv": (channels, n_embd),
        "attn_gate": (inner, n_embd),
        "ssm_alpha": (value_heads, n_embd),
        "ssm_beta": (value_heads, n_embd),
        "ssm_out": (n_embd, inner),
    }
    attention = _attention(n_embd, n_heads, n_kv_heads, head)
    attention["attn_q"] = (2 * n_heads * head, n_embd)  # a gate behind every query
    layers, vectors = [], [_norm("output_norm", n_embd)]
    for index in range(n_layers):
        full, own = index % interval == interval - 1, f"blk.{index}."
        layers.append((attention if full else recurrence) | _feed_forward(n_embd, n_ff))
        vectors += [_norm(f"{own}attn_norm", n_embd), _norm(f"{own}post_attention_norm", n_embd)]
        vectors += (
            _query_norms(index, head)
            if full
            else [
                Vector(f"{own}ssm_conv1d.weight", (channels, kernel), -0.8, 0.8),
                Vector(f"{own}ssm_dt.bias", (value_heads,), -4.0, 0.0),
                Vector(f"{own}ssm_a", (value_heads,), -16.0, -1.0),
                _norm(f"{own}ssm_norm", state),
            ]
        )
    return LayeredShape("qwen35", n_embd, n_vocab, keys, layers, vectors)


def lfm2(
    *,
    n_embd: int,
    n_heads: int,
    n_kv_heads: int,
    n_ff: int,
    attends: Sequence[bool],
    n_vocab: int = 65536,
) -> LayeredShape:
    """Short convolutions, and attention in some of the layers."""
    head, kernel = n_embd // n_heads, 3
    keys = {
        "context_length": 128000,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": [n_kv_heads if here else 0 for here in attends],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
        "shortconv.l_cache": kernel,
    }
    convolution = {"shortconv.in_proj": (3 * n_embd, n_embd), "shortconv.out_proj": (n_embd, n_embd)}
    attention = _attention(n_embd, n_heads, n_kv_heads, head)
    layers, vectors = [], [_norm("token_embd_norm", n_embd)]
    for index, here in enumerate(attends):
        layers.append((attention if here else convolution) | _feed_forward(n_embd, n_ff))
        vectors += _plain_norms(index, n_embd)
        vectors += (
            _query_norms(index, head)
            if here
            else [Vector(f"blk.{index}.shortconv.conv.weight", (n_embd, kernel), -1.0, 1.0)]
        )
    return LayeredShape("lfm2", n_embd, n_vocab, keys, layers, vectors)


def granite_hybrid(
    *,
    n_embd: int,
    n_heads: int,
    n_kv_heads: int,
    n_ff: int,
    attends: Sequence[bool],
    ssm_heads: int,
    n_vocab: int = 100352,
) -> LayeredShape:
    """Mamba 2 with a state of 128, and attention without positions in some of the layers."""
    head, state, kernel, inner = n_embd // n_heads, 128, 4, 2 * n_embd
    channels = inner + 2 * state
    keys = {
        "context_length": 131072,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": [n_kv_heads if here else 0 for here in attends],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.scale": 1 / head,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 6.0,
        "rope.dimension_count": head,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": kernel,
        "ssm.state_size": state,
        "ssm.group_count": 1,
        "ssm.time_step_rank": ssm_heads,
        "ssm.inner_size": inner,
    }
    recurrence = {"ssm_in": (inner + channels + ssm_heads, n_embd), "ssm_out": (n_embd, inner)}
    attention = _attention(n_embd, n_heads, n_kv_heads, head)
    layers, vectors = [], [_norm("output_norm", n_embd)]
    for index, here in enumerate(attends):
        own = f"blk.{index}."
        layers.append((attention if here else recurrence) | _feed_forward(n_embd, n_ff))
        vectors += _plain_norms(index, n_embd)
        if not here:
            vectors += [
                Vector(f"{own}ssm_conv1d.weight", (channels, kernel), -0.8, 0.8),
                Vector(f"{own}ssm_conv1d.bias", (channels,), -0.1, 0.1),
                Vector(f"{own}ssm_dt.bias", (ssm_heads,), -4.0, 0.0),
                Vector(f"{own}ssm_a", (ssm_heads, 1), -16.0, -1.0),
                Vector(f"{own}ssm_d", (ssm_heads, 1)),
                Vector(f"{own}ssm_norm.weight", (1, inner)),
            ]
    return LayeredShape("granitehybrid", n_embd, n_vocab, keys, layers, vectors)


def _attention(n_embd: int, n_heads: int, n_kv_heads: int, head: int) -> dict[str, tuple[int, int]]:
    queries, keys = n_heads * head, n_kv_heads * head
    return {
        "attn_q": (queries, n_embd),
        "attn_k": (keys, n_embd),
        "attn_v": (keys, n_embd),
        "attn_output": (n_embd, queries),
    }


def _feed_forward(n_embd: int, n_ff: int) -> dict[str, tuple[int, int]]:
    return {"ffn_gate": (n_ff, n_embd), "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}


def _norm(role: str, size: int, value: float = 1.0) -> Vector:
    return Vector(f"{role}.weight", (size,), value, value)


def _plain_norms(index: int, n_embd: int) -> list[Vector]:
    return [_norm(f"blk.{index}.{role}_norm", n_embd) for role in ("attn", "ffn")]


def _sandwich(index: int, n_embd: int) -> list[Vector]:
    roles = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    return [_norm(f"blk.{index}.{role}", n_embd) for role in roles]


def _query_norms(index: int, head: int, value: float = 1.0) -> list[Vector]:
    return [_norm(f"blk.{index}.attn_{part}_norm", head, value) for part in "qk"]


LAYERED = {
    "gemma3-4B": gemma3(n_layers=34, n_embd=2560, n_heads=8, n_kv_heads=4, n_ff=10240, window=1024),
    "gemma4-E4B": gemma4(
        n_layers=42, n_embd=2560, n_heads=8, n_kv_heads=2, n_ff=10240, window=512, shared=18, per_layer=256
    ),
    "qwen3.5-0.8B": qwen35(n_layers=24, n_embd=1024, n_heads=8, n_kv_heads=2, n_ff=3584, key_heads=16, value_heads=16),
    "qwen3.5-2B": qwen35(n_layers=24, n_embd=2048, n_heads=8, n_kv_heads=2, n_ff=6144, key_heads=16, value_heads=16),
    "qwen3.5-4B": qwen35(n_layers=32, n_embd=2560, n_heads=16, n_kv_heads=4, n_ff=9216, key_heads=16, value_heads=32),
    "lfm2-1.2B": lfm2(
        n_embd=2048,
        n_heads=32,
        n_kv_heads=8,
        n_ff=8192,
        attends=[index in (2, 5, 8, 10, 12, 14) for index in range(16)],
    ),
    "granite4-h-1B": granite_hybrid(
        n_embd=1536,
        n_heads=12,
        n_kv_heads=4,
        n_ff=4096,
        attends=[index in (5, 15, 25, 35) for index in range(40)],
        ssm_heads=48,
    ),
}
