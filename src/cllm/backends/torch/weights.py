"""Weights under the names of Hugging Face's models, from wherever they come, joined as the model wants them.

A source hands a tensor out in pieces, and each is converted and copied into its place before the next is read. So the
host holds one piece beside the weights, and nothing but that where they are on a GPU.

In fp8 are the matrices that rows are multiplied with, each of their rows with a scale of its own: eight bits have four
for the exponent and three for the fraction. The embedding, norms and biases are bf16 then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch

from cllm.backends.torch.device import values_dtype
from cllm.backends.torch.linear import FP8, quantise_rows
from cllm.backends.torch.model import Layer, Weights
from cllm.errors import ModelError
from cllm.models.load_progress import ByteProgress
from cllm.models.spec import LayerSpec, ModelSpec
from cllm.models.tensors import (
    HF_EMBEDDING,
    HF_HEAD,
    HF_NORM,
    TensorSpec,
    all_tensors,
    hf_name,
    layer_tensors,
    outer_tensors,
)

_UNUSED = ".rotary_emb.inv_freq"
_AGAIN = "fetch the model again"
SCALE = torch.float32
_QUANTISED_TOGETHER = 1 << 19
"""Values; they are float32 meanwhile, several times."""

TensorShape = tuple[int, ...]


class WeightSource(Protocol):
    """Where weights come from. What is wrong with them is a `ModelError`."""

    @property
    def label(self) -> str:
        """The file or directory, for messages."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> TensorShape: ...

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Rows of the tensor, one below the other, in host memory; each is valid until the next one is asked for."""


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """However many equal layers are claimed, this takes no time."""
    total = sum(_stored_bytes(item, dtype) for item in outer_tensors(spec))
    for layer, count in Counter(spec.layers).items():
        total += count * sum(_stored_bytes(item, dtype) for item in layer_tensors(spec, layer, 0))
    return total


def _stored_bytes(item: TensorSpec, dtype: torch.dtype) -> int:
    if dtype == FP8 and len(item.shape) == 2 and item.role != "token_embd":
        return math.prod(item.shape) + item.rows * int(SCALE.itemsize)
    return math.prod(item.shape) * int(values_dtype(dtype).itemsize)


def check_source(source: WeightSource, spec: ModelSpec) -> None:
    """Raise `ModelError` unless the source has just the tensors of such a model. No memory is taken for any of them."""
    names, known = source.names, set()
    for item in all_tensors(spec):  # the first that is missing ends this, however many are claimed
        name = hf_name(item.name)
        if name not in names:
            raise ModelError(f"{source.label}: the tensor {name} is missing; {_AGAIN}")
        if source.shape(name) != item.shape:
            has, should = (" x ".join(map(str, each)) for each in (source.shape(name), item.shape))
            raise ModelError(f"{source.label}: the tensor {name} is {has}, but should be {should}; {_AGAIN}")
        known.add(name)
    for name in names:
        if name not in known and not name.endswith(_UNUSED) and not (name == HF_HEAD and spec.tied):
            raise ModelError(f"{source.label}: the tensor {name} is unknown for this kind of model; use another one")


class Loader:
    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: torch.device, progress: ByteProgress | None
    ) -> None:
        self._source = source
        self._dtype, self._values = dtype, values_dtype(dtype)
        self._device = device
        self._progress = progress
        self._loaded = self._expected = 0

    def load(self, spec: ModelSpec) -> Weights:
        check_source(self._source, spec)
        self._expected = weight_bytes(spec, self._dtype)
        embedding = self._joined([HF_EMBEDDING], spec.n_vocab, spec.n_embd)
        layers = [self._layer(layer, spec.n_embd, index) for index, layer in enumerate(spec.layers)]
        norm = self._joined([HF_NORM], spec.n_embd)
        if spec.tied:
            return Weights(embedding, layers, norm, embedding)
        head, scales = self._matrix([HF_HEAD], spec.n_vocab, spec.n_embd)
        return Weights(embedding, layers, norm, head, scales)

    def _layer(self, layer: LayerSpec, n_embd: int, index: int) -> Layer:
        prefix = f"model.layers.{index}."
        attention, ffn = prefix + "self_attn.", prefix + "mlp."
        spec, n_ff = layer.attention, layer.feed_forward.size
        qkv = [f"{attention}{part}_proj." for part in "qkv"]
        matrices = {
            "qkv": self._matrix([f"{each}weight" for each in qkv], spec.qkv_size, n_embd),
            "output": self._matrix([attention + "o_proj.weight"], n_embd, spec.output_size),
            "gate_up": self._matrix([ffn + "gate_proj.weight", ffn + "up_proj.weight"], 2 * n_ff, n_embd),
            "down": self._matrix([ffn + "down_proj.weight"], n_embd, n_ff),
        }
        return Layer(
            attention_norm=self._joined([prefix + "input_layernorm.weight"], n_embd),
            qkv_bias=self._joined([f"{each}bias" for each in qkv], spec.qkv_size) if spec.qkv_bias else None,
            q_norm=self._joined([attention + "q_norm.weight"], spec.head_dim_k) if spec.qk_norm else None,
            k_norm=self._joined([attention + "k_norm.weight"], spec.head_dim_k) if spec.qk_norm else None,
            output_bias=self._joined([attention + "o_proj.bias"], n_embd) if spec.output_bias else None,
            ffn_norm=self._joined([prefix + "post_attention_layernorm.weight"], n_embd),
            **{name: matrix for name, (matrix, _) in matrices.items()},
            scales={name: scales for name, (_, scales) in matrices.items() if scales is not None} or None,
        )

    def _matrix(self, names: Sequence[str], rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Matrices one below the other, and in fp8 the scales of their rows."""
        if self._dtype != FP8:
            return self._joined(names, rows, columns), None
        together = torch.empty((rows, columns), dtype=FP8, device=self._device)
        scales = torch.empty(rows, dtype=SCALE, device=self._device)
        for first, piece in self._pieces(names):
            for some in piece.to(self._device).split(max(1, _QUANTISED_TOGETHER // columns)):
                end = first + len(some)
                together[first:end], scales[first:end] = quantise_rows(some)
                first = end
            self._report(piece.numel() + len(piece) * SCALE.itemsize)
        return together, scales

    def _joined(self, names: Sequence[str], *shape: int) -> torch.Tensor:
        """Tensors one below the other, which are of this shape together."""
        together = torch.empty(shape, dtype=self._values, device=self._device)
        for first, piece in self._pieces(names):
            together[first : first + len(piece)].copy_(piece)
            self._report(piece.numel() * together.itemsize)
        return together

    def _pieces(self, names: Sequence[str]) -> Iterator[tuple[int, torch.Tensor]]:
        """With the number of the first row of each."""
        first = 0
        for name in names:
            for piece in self._source.pieces(name):
                yield first, piece
                first += len(piece)

    def _report(self, count: int) -> None:
        self._loaded += count
        if self._progress is not None:
            self._progress(self._loaded, self._expected)
