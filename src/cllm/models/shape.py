"""The sizes of a model."""

from __future__ import annotations

from dataclasses import dataclass

from cllm.kv.sizing import bytes_per_token


@dataclass(frozen=True, slots=True)
class ModelShape:
    architecture: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    n_vocab: int
    context_length: int
    """The context the model was trained for."""

    def kv_bytes_per_token(self, type_k: str, type_v: str) -> int:
        """What a token's K and V take in all layers."""
        return bytes_per_token(
            n_layers=self.n_layers,
            n_kv_heads=self.n_kv_heads,
            head_dim_k=self.head_dim_k,
            head_dim_v=self.head_dim_v,
            type_k=type_k,
            type_v=type_v,
        )
