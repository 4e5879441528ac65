"""What a model is, in numbers: one description for files of either format and for every backend.

    ModelSpec ── layers: (LayerSpec, …)      equal layers are one object
                          ├── attention      heads, their sizes, and how positions turn them
                          └── feed_forward

A GGUF file that only llama.cpp can run states less than that: its layers have no rotation, and sizes of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from cllm.kv.sizing import KV_TYPES

MOST_LAYERS = 1 << 16
"""What a file claims beyond that is never there, and would take much memory."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How RoPE turns the first `dims` dimensions of a head."""

    base: float
    dims: int
    neox: bool
    """Whether dimension i turns with i + dims / 2; otherwise 2i with 2i + 1."""
    scale: float = 1.0
    """Positions are divided by this."""
    divisors: tuple[float, ...] | None = None
    """By how much the turning of each pair of dimensions is slowed down beside that."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    n_heads: int
    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    rotation: Rotation | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """Whether the queries and keys of every head are normalised."""

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim_k

    @property
    def k_size(self) -> int:
        return self.n_kv_heads * self.head_dim_k

    @property
    def v_size(self) -> int:
        return self.n_kv_heads * self.head_dim_v

    @property
    def qkv_size(self) -> int:
        return self.q_size + self.k_size + self.v_size

    @property
    def output_size(self) -> int:
        """Values that all heads give together."""
        return self.n_heads * self.head_dim_v

    def kv_bytes_per_token(self, type_k: str, type_v: str) -> int:
        """KV heads count, not query heads."""
        key, value = KV_TYPES[type_k].row_bytes(self.head_dim_k), KV_TYPES[type_v].row_bytes(self.head_dim_v)
        return self.n_kv_heads * (key + value)


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    size: int = 0
    """Values between its matrices."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    attention: AttentionSpec
    feed_forward: FeedForwardSpec = FeedForwardSpec()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    architecture: str
    n_embd: int
    n_vocab: int
    context_length: int
    """The context the model was trained for."""
    layers: tuple[LayerSpec, ...]
    rms_eps: float = 0.0
    tied: bool = False
    """Whether the output head is the embedding."""

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def kv_bytes_per_token(self, type_k: str, type_v: str) -> int:
        """What a token's K and V take in all layers."""
        return sum(layer.attention.kv_bytes_per_token(type_k, type_v) for layer in self.layers)
