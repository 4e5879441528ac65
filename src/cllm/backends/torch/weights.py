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
from cllm.models.hf_directory import HEAD
from cllm.models.load_progress import ByteProgress
from cllm.models.spec import LayerSpec, ModelSpec

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
_UNUSED = ".rotary_emb.inv_freq"
_AGAIN = "fetch the model again"
SCALE = torch.float32
_QUANTISED_TOGETHER = 1 << 19
"""Values; they are float32 meanwhile, several times."""

TensorShape = tuple[int, ...]


class Source(Protocol):
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
    total = sum(_stored_bytes(name, shape, dtype) for name, shape in _wanted_beside(spec))
    for layer, count in Counter(spec.layers).items():
        total += count * sum(_stored_bytes(name, shape, dtype) for name, shape in _wanted_in_layer(layer, spec.n_embd))
    return total


def _stored_bytes(name: str, shape: TensorShape, dtype: torch.dtype) -> int:
    if dtype == FP8 and _is_multiplied(name, shape):
        return math.prod(shape) + shape[0] * int(SCALE.itemsize)
    return math.prod(shape) * int(values_dtype(dtype).itemsize)


def _is_multiplied(name: str, shape: TensorShape) -> bool:
    return len(shape) == 2 and name != EMBEDDING


def check_source(source: Source, spec: ModelSpec) -> None:
    """Raise `ModelError` unless the source has just the tensors of such a model. No memory is taken for any of them."""
    names, known = source.names, set()
    for name, shape in _wanted(spec):  # the first that is missing ends this, however many are claimed
        if name not in names:
            raise ModelError(f"{source.label}: the tensor {name} is missing; {_AGAIN}")
        if source.shape(name) != shape:
            has, should = (" x ".join(map(str, each)) for each in (source.shape(name), shape))
            raise ModelError(f"{source.label}: the tensor {name} is {has}, but should be {should}; {_AGAIN}")
        known.add(name)
    for name in names:
        if name not in known and not name.endswith(_UNUSED) and not (name == HEAD and spec.tied):
            raise ModelError(f"{source.label}: the tensor {name} is unknown for this kind of model; use another one")


class Loader:
    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device, progress: ByteProgress | None) -> None:
        self._source = source
        self._dtype, self._values = dtype, values_dtype(dtype)
        self._device = device
        self._progress = progress
        self._loaded = self._expected = 0

    def load(self, spec: ModelSpec) -> Weights:
        check_source(self._source, spec)
        self._expected = weight_bytes(spec, self._dtype)
        embedding = self._joined([EMBEDDING], spec.n_vocab, spec.n_embd)
        layers = [self._layer(layer, spec.n_embd, index) for index, layer in enumerate(spec.layers)]
        norm = self._joined([NORM], spec.n_embd)
        if spec.tied:
            return Weights(embedding, layers, norm, embedding)
        head, scales = self._matrix([HEAD], spec.n_vocab, spec.n_embd)
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


def _wanted(spec: ModelSpec) -> Iterator[tuple[str, TensorShape]]:
    """Every tensor of the model with its shape."""
    yield from _wanted_beside(spec)
    for index, layer in enumerate(spec.layers):
        for name, shape in _wanted_in_layer(layer, spec.n_embd):
            yield f"model.layers.{index}.{name}", shape


def _wanted_beside(spec: ModelSpec) -> Iterator[tuple[str, TensorShape]]:
    yield EMBEDDING, (spec.n_vocab, spec.n_embd)
    yield NORM, (spec.n_embd,)
    if not spec.tied:
        yield HEAD, (spec.n_vocab, spec.n_embd)


def _wanted_in_layer(layer: LayerSpec, n_embd: int) -> Iterator[tuple[str, TensorShape]]:
    attention, n_ff = layer.attention, layer.feed_forward.size
    yield "input_layernorm.weight", (n_embd,)
    yield "post_attention_layernorm.weight", (n_embd,)
    for part, size in (("q", attention.q_size), ("k", attention.k_size), ("v", attention.v_size)):
        yield f"self_attn.{part}_proj.weight", (size, n_embd)
        if attention.qkv_bias:
            yield f"self_attn.{part}_proj.bias", (size,)
        if attention.qk_norm and part != "v":
            yield f"self_attn.{part}_norm.weight", (attention.head_dim_k,)
    yield "self_attn.o_proj.weight", (n_embd, attention.output_size)
    if attention.output_bias:
        yield "self_attn.o_proj.bias", (n_embd,)
    yield "mlp.gate_proj.weight", (n_ff, n_embd)
    yield "mlp.up_proj.weight", (n_ff, n_embd)
    yield "mlp.down_proj.weight", (n_embd, n_ff)
