"""Weights under the names of Hugging Face's models, from wherever they come, joined as the model wants them.

A source hands a tensor out in pieces, and each is converted and copied into its place before the next is read. So the
host holds one piece beside the weights, and nothing but that where they are on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import torch

from cllm.backends.torch.decoder import Decoder
from cllm.backends.torch.model import Layer, Weights
from cllm.errors import ModelError

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_UNUSED = ".rotary_emb.inv_freq"
_AGAIN = "fetch the model again"

Progress = Callable[[int, int], None]
"""Called with the bytes of weights that there are and that there will be."""
Shape = tuple[int, ...]


class Source(Protocol):
    """Where weights come from. What is wrong with them is a `ModelError`."""

    @property
    def label(self) -> str:
        """The file or directory, for messages."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> Shape: ...

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Rows of the tensor, one below the other, in host memory; each is valid until the next one is asked for."""


def weight_bytes(decoder: Decoder, dtype: torch.dtype) -> int:
    return sum(math.prod(shape) for _, shape in _wanted(decoder)) * int(dtype.itemsize)


def check_source(source: Source, decoder: Decoder) -> None:
    """Raise `ModelError` unless the source has just the tensors of such a model. No memory is taken for any of them."""
    names, known = source.names, set()
    for name, shape in _wanted(decoder):  # the first that is missing ends this, however many are claimed
        if name not in names:
            raise ModelError(f"{source.label}: the tensor {name} is missing; {_AGAIN}")
        if source.shape(name) != shape:
            has, should = (" x ".join(map(str, each)) for each in (source.shape(name), shape))
            raise ModelError(f"{source.label}: the tensor {name} is {has}, but should be {should}; {_AGAIN}")
        known.add(name)
    for name in names:
        if name not in known and not name.endswith(_UNUSED) and not (name == HEAD and decoder.tied):
            raise ModelError(
                f"{source.label}: it has the tensor {name}, whose use is unknown for such a model; give another one"
            )


class Loader:
    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device, progress: Progress | None) -> None:
        self._source = source
        self._to = {"dtype": dtype, "device": device}
        self._progress = progress
        self._loaded = self._expected = 0

    def load(self, decoder: Decoder) -> Weights:
        check_source(self._source, decoder)
        self._expected = weight_bytes(decoder, self._to["dtype"])
        embedding = self._joined([EMBEDDING], decoder.n_vocab, decoder.n_embd)
        layers = [self._layer(decoder, f"model.layers.{index}.") for index in range(decoder.n_layers)]
        norm = self._joined([NORM], decoder.n_embd)
        head = embedding if decoder.tied else self._joined([HEAD], decoder.n_vocab, decoder.n_embd)
        return Weights(embedding, layers, norm, head)

    def _layer(self, decoder: Decoder, prefix: str) -> Layer:
        attention, ffn = prefix + "self_attn.", prefix + "mlp."
        n_embd, head_dim, q_size = decoder.n_embd, decoder.head_dim, decoder.q_size
        qkv = [f"{attention}{part}_proj." for part in "qkv"]
        norms = decoder.head_norm
        return Layer(
            attention_norm=self._joined([prefix + "input_layernorm.weight"], n_embd),
            qkv=self._joined([f"{each}weight" for each in qkv], decoder.qkv_size, n_embd),
            qkv_bias=self._joined([f"{each}bias" for each in qkv], decoder.qkv_size) if decoder.qkv_bias else None,
            q_norm=self._joined([attention + "q_norm.weight"], head_dim) if norms else None,
            k_norm=self._joined([attention + "k_norm.weight"], head_dim) if norms else None,
            output=self._joined([attention + "o_proj.weight"], n_embd, q_size),
            output_bias=self._joined([attention + "o_proj.bias"], n_embd) if decoder.output_bias else None,
            ffn_norm=self._joined([prefix + "post_attention_layernorm.weight"], n_embd),
            gate_up=self._joined([ffn + "gate_proj.weight", ffn + "up_proj.weight"], 2 * decoder.n_ff, n_embd),
            down=self._joined([ffn + "down_proj.weight"], n_embd, decoder.n_ff),
        )

    def _joined(self, names: Sequence[str], *shape: int) -> torch.Tensor:
        """Tensors one below the other, which are of this shape together."""
        together = torch.empty(shape, **self._to)
        first = 0
        for name in names:
            for piece in self._source.pieces(name):
                together[first : first + len(piece)].copy_(piece)
                first += len(piece)
                self._loaded += piece.numel() * together.itemsize
                if self._progress is not None:
                    self._progress(self._loaded, self._expected)
        return together


def _wanted(decoder: Decoder) -> Iterator[tuple[str, Shape]]:
    """Every tensor of the model with its shape."""
    yield EMBEDDING, (decoder.n_vocab, decoder.n_embd)
    yield NORM, (decoder.n_embd,)
    if not decoder.tied:
        yield HEAD, (decoder.n_vocab, decoder.n_embd)
    sizes = list(_wanted_in_layer(decoder))
    for index in range(decoder.n_layers):
        for name, shape in sizes:
            yield f"model.layers.{index}.{name}", shape


def _wanted_in_layer(decoder: Decoder) -> Iterator[tuple[str, Shape]]:
    n_embd, n_ff = decoder.n_embd, decoder.n_ff
    yield "input_layernorm.weight", (n_embd,)
    yield "post_attention_layernorm.weight", (n_embd,)
    for part, size in (("q", decoder.q_size), ("k", decoder.kv_size), ("v", decoder.kv_size)):
        yield f"self_attn.{part}_proj.weight", (size, n_embd)
        if decoder.qkv_bias:
            yield f"self_attn.{part}_proj.bias", (size,)
        if decoder.head_norm and part != "v":
            yield f"self_attn.{part}_norm.weight", (decoder.head_dim,)
    yield "self_attn.o_proj.weight", (n_embd, decoder.q_size)
    if decoder.output_bias:
        yield "self_attn.o_proj.bias", (n_embd,)
    yield "mlp.gate_proj.weight", (n_ff, n_embd)
    yield "mlp.up_proj.weight", (n_ff, n_embd)
    yield "mlp.down_proj.weight", (n_embd, n_ff)
