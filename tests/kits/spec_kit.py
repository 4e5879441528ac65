"""Specs of small models whose layers are equal."""

from __future__ import annotations

from typing import Any

from cllm.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, Rotation


def make_spec(
    n_layers: int = 1,
    n_embd: int = 64,
    n_heads: int = 2,
    n_kv_heads: int = 1,
    head_dim: int = 32,
    n_ff: int = 64,
    n_vocab: int = 50,
    *,
    rms_eps: float = 1e-5,
    rotation: Rotation | None = None,
    **attention: Any,
) -> ModelSpec:
    turned = rotation or Rotation(10000.0, head_dim, neox=True)
    layer = LayerSpec(
        AttentionSpec(n_heads, n_kv_heads, head_dim, head_dim, turned, **attention), FeedForwardSpec(n_ff)
    )
    return ModelSpec("llama", n_embd, n_vocab, 512, (layer,) * n_layers, rms_eps)
