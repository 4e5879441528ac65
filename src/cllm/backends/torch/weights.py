"""Weights under the names of Hugging Face's models, from wherever they come, joined as the model wants them.

Each tensor is read, converted and copied into its place by itself, so that the host never holds more than one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from cllm.backends.torch.decoder import Decoder
from cllm.backends.torch.model import Layer, Weights
from cllm.errors import ModelError

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
Progress = Callable[[int, int], None]
"""Called with the number of tensors that are loaded and of all."""


class Source(Protocol):
    """Where weights come from."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in host memory, of any type."""


class Loader:
    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device, progress: Progress | None) -> None:
        self._source = source
        self._to = {"dtype": dtype, "device": device}
        self._progress = progress
        self._loaded = 0
        self._expected = 0

    def load(self, decoder: Decoder) -> Weights:
        per_layer = 9 + (3 if decoder.qkv_bias else 0) + (2 if decoder.head_norm else 0)
        self._expected = 2 + (HEAD in self._source) + per_layer * decoder.n_layers
        embedding = self._joined([(EMBEDDING, decoder.n_vocab)], decoder.n_embd)
        layers = [self._layer(decoder, f"model.layers.{index}.") for index in range(decoder.n_layers)]
        norm = self._vector(NORM, decoder.n_embd)
        head = self._joined([(HEAD, decoder.n_vocab)], decoder.n_embd) if HEAD in self._source else embedding
        return Weights(embedding, layers, norm, head)

    def _layer(self, decoder: Decoder, prefix: str) -> Layer:
        sizes = (("q", decoder.q_size), ("k", decoder.kv_size), ("v", decoder.kv_size))
        attention, ffn = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            attention_norm=self._vector(prefix + "input_layernorm.weight", decoder.n_embd),
            qkv=self._joined([(f"{attention}{part}_proj.weight", size) for part, size in sizes], decoder.n_embd),
            qkv_bias=self._bias([(f"{attention}{part}_proj.bias", size) for part, size in sizes], decoder),
            q_norm=self._vector(attention + "q_norm.weight", decoder.head_dim) if decoder.head_norm else None,
            k_norm=self._vector(attention + "k_norm.weight", decoder.head_dim) if decoder.head_norm else None,
            output=self._joined([(attention + "o_proj.weight", decoder.n_embd)], decoder.q_size),
            ffn_norm=self._vector(prefix + "post_attention_layernorm.weight", decoder.n_embd),
            gate_up=self._joined(
                [(ffn + "gate_proj.weight", decoder.n_ff), (ffn + "up_proj.weight", decoder.n_ff)], decoder.n_embd
            ),
            down=self._joined([(ffn + "down_proj.weight", decoder.n_embd)], decoder.n_ff),
        )

    def _joined(self, parts: Sequence[tuple[str, int]], columns: int) -> torch.Tensor:
        """Matrices of so many rows each, one below the other."""
        together = torch.empty((sum(rows for _, rows in parts), columns), **self._to)
        first = 0
        for name, rows in parts:
            together[first : first + rows].copy_(self._read(name, (rows, columns)))
            first += rows
        return together

    def _vector(self, name: str, size: int) -> torch.Tensor:
        return self._read(name, (size,)).to(**self._to)

    def _bias(self, parts: Sequence[tuple[str, int]], decoder: Decoder) -> torch.Tensor | None:
        return torch.cat([self._vector(name, size) for name, size in parts]) if decoder.qkv_bias else None

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._source:
            raise ModelError(f"the tensor {name} is missing; fetch the model again")
        tensor = self._source.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"the tensor {name} is {tuple(tensor.shape)}, but should be {shape}; fetch the model again")
        self._loaded += 1
        if self._progress is not None:
            self._progress(self._loaded, self._expected)
        return tensor
