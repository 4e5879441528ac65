"""Weights from wherever they come, joined as the model wants them.

A source hands a tensor out in pieces, and each is converted and copied into its place before the next is read. So the
host holds one piece beside the weights, and nothing but that where they are on a GPU.

In fp8 are the matrices that rows are multiplied with, each of their rows with a scale of its own: eight bits have four
for the exponent and three for the fraction. The embedding, norms and biases are bf16 then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from cllm.backends.torch.device import values_dtype
from cllm.backends.torch.linear import FP8, quantise_rows
from cllm.backends.torch.model import Layer, LayerInputs, Weights
from cllm.backends.torch.recurrences import Recurrence
from cllm.backends.torch.rotations import head_order, reorder
from cllm.models.load_progress import ByteProgress
from cllm.models.spec import AttentionSpec, DeltaNetSpec, LayerSpec, ModelSpec, RecurrenceSpec
from cllm.models.tensors import TensorSpec, all_tensors, layer_tensors, outer_tensors

_VECTORS = {
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "sinks": "attn_sinks",
    "output_bias": "attn_output.bias",
    "ffn_norm": "ffn_norm",
    "ffn_post_norm": "post_ffw_norm",
    "input_norm": "post_norm",
    "output_scale": "layer_output_scale",
}
"""Fields of a `Layer`, and the tensors that they are."""
_RATES = "ssm_beta", "ssm_alpha"
_STATE_VALUES = {
    "ssm_conv1d": "taps",
    "shortconv.conv": "taps",
    "ssm_conv1d.bias": "conv_bias",
    "ssm_a": "decay",
    "ssm_dt.bias": "step_bias",
    "ssm_d": "skip",
    "ssm_norm": "norm",
}
"""Tensors that states are computed with, and the fields of a `Recurrence` that they are: always float32."""
_NOT_QUANTISED = ("token_embd", "per_layer_token_embd", *_RATES)
SCALE = torch.float32
_QUANTISED_TOGETHER = 1 << 19
"""Values; they are float32 meanwhile, several times."""


class WeightSource(Protocol):
    """Where weights come from. What is wrong with them is a `ModelError`."""

    def tensors(self, spec: ModelSpec) -> Iterator[TensorSpec]:
        """What the model needs, as it is stored. Ends at the first tensor that is missing or has another size, however
        many are claimed; also if there is one that nothing needs. Biases may be left out."""

    def pieces(self, item: TensorSpec) -> Iterator[torch.Tensor]:
        """Rows of a tensor, one below the other, in host memory; each is valid until the next one is asked for."""


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """However many equal layers are claimed, this takes no time."""
    total = sum(_stored_bytes(item, dtype) for item in outer_tensors(spec))
    for layer, count in Counter(spec.layers).items():
        total += count * sum(_stored_bytes(item, dtype) for item in layer_tensors(spec, layer, 0))
    return total


def _stored_bytes(item: TensorSpec, dtype: torch.dtype) -> int:
    if item.role in _STATE_VALUES:
        return math.prod(item.shape) * int(torch.float32.itemsize)
    if dtype == FP8 and len(item.shape) == 2 and item.role not in _NOT_QUANTISED:
        return math.prod(item.shape) + item.rows * int(SCALE.itemsize)
    return math.prod(item.shape) * int(values_dtype(dtype).itemsize)


class Loader:
    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: torch.device, progress: ByteProgress | None
    ) -> None:
        self._source = source
        self._dtype, self._values = dtype, values_dtype(dtype)
        self._device = device
        self._progress = progress
        self._loaded = self._expected = 0
        self._stored: dict[tuple[int, str], TensorSpec] = {}
        self._rows: dict[tuple[int, str], int] = {}

    def load(self, spec: ModelSpec) -> Weights:
        self._stored = {(item.layer, item.role): item for item in self._source.tensors(spec)}
        self._rows = {(item.layer, item.role): item.shape[0] for item in all_tensors(spec)}
        self._expected = weight_bytes(spec, self._dtype)
        embedding = self._values_of(-1, "token_embd", spec.n_vocab, spec.n_embd)
        weights = Weights(
            embedding,
            [self._layer(spec, layer, index) for index, layer in enumerate(spec.layers)],
            self._values_of(-1, "output_norm", spec.n_embd),
            embedding,
            inputs=self._inputs(spec) if spec.layer_input_size else None,
        )
        if not spec.tied:
            weights.head, weights.head_scales = self._matrix(-1, ["output"], spec.n_vocab, spec.n_embd)
        return weights

    def _inputs(self, spec: ModelSpec) -> LayerInputs:
        together = spec.n_layers * spec.layer_input_size
        projection, scales = self._matrix(-1, ["per_layer_model_proj"], together, spec.n_embd)
        embedding = self._values_of(-1, "per_layer_token_embd", spec.n_vocab, together)
        return LayerInputs(
            embedding, projection, self._values_of(-1, "per_layer_proj_norm", spec.layer_input_size), scales
        )

    def _layer(self, spec: ModelSpec, layer: LayerSpec, index: int) -> Layer:
        sizes = {item.role: item.shape for item in layer_tensors(spec, layer, index)}
        qkv = [role for role in ("attn_q", "attn_k", "attn_v") if role in sizes]
        parts = {name: [role for role in roles if role in sizes] for name, roles in _matrices_of(layer).items()}
        matrices = {
            name: self._matrix(index, roles, sum(sizes[role][0] for role in roles), sizes[roles[0]][1])
            for name, roles in parts.items()
            if roles
        }
        scales = {name: scales for name, (_, scales) in matrices.items() if scales is not None}
        vectors = {name: self._values_of(index, role, *sizes[role]) for name, role in _VECTORS.items() if role in sizes}
        made = Layer(
            **{name: matrix for name, (matrix, _) in matrices.items()},
            **vectors,
            scales=scales or None,
        )
        if layer.attention is not None:
            if layer.attention.qkv_bias:
                biases = [f"{role}.bias" for role in qkv]
                made.qkv_bias = self._joined(index, biases, sum(sizes[role][0] for role in biases))
            _split_gate(made, layer.attention)
            _reorder_heads(made, layer.attention)
        if layer.recurrence is not None:
            made.recurrence = self._recurrence(layer.recurrence, spec.rms_eps, index, sizes)
            if isinstance(layer.recurrence, DeltaNetSpec):
                rows = sum(sizes[role][0] for role in _RATES)
                made.states_rates = self._joined(index, _RATES, rows, spec.n_embd)
        if made.ffn_norm is None and layer.attention is None and layer.recurrence is None:
            made.ffn_norm, made.attention_norm = made.attention_norm, None
        return made

    def _recurrence(
        self, spec: RecurrenceSpec, eps: float, index: int, sizes: Mapping[str, tuple[int, ...]]
    ) -> Recurrence:
        values = {
            name: self._joined(index, [role], *sizes[role], dtype=torch.float32)
            for role, name in _STATE_VALUES.items()
            if role in sizes
        }
        values["taps"] = values["taps"].t().contiguous()
        return Recurrence(spec, eps, **values)

    def _matrix(
        self, layer: int, roles: Sequence[str], rows: int, columns: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Matrices one below the other, and in fp8 the scales of their rows."""
        if self._dtype != FP8:
            return self._joined(layer, roles, rows, columns), None
        together = torch.empty((rows, columns), dtype=FP8, device=self._device)
        scales = torch.empty(rows, dtype=SCALE, device=self._device)
        for first, piece in self._pieces(layer, roles):
            for some in piece.to(self._device).split(max(1, _QUANTISED_TOGETHER // columns)):
                end = first + len(some)
                together[first:end], scales[first:end] = quantise_rows(some)
                first = end
            self._report(piece.numel() + len(piece) * SCALE.itemsize)
        return together, scales

    def _values_of(self, layer: int, role: str, *shape: int) -> torch.Tensor:
        return self._joined(layer, [role], *shape)

    def _joined(self, layer: int, roles: Sequence[str], *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Tensors one below the other, which are of this shape together. Biases that are left out are zero."""
        kind = torch.zeros if roles[0].endswith(".bias") else torch.empty
        together = kind(shape, dtype=dtype or self._values, device=self._device)
        for first, piece in self._pieces(layer, roles):
            together[first : first + len(piece)].copy_(piece)
            self._report(piece.numel() * together.itemsize)
        return together

    def _pieces(self, layer: int, roles: Sequence[str]) -> Iterator[tuple[int, torch.Tensor]]:
        """With the number of the first row of each."""
        begin = 0
        for role in roles:
            first, item = begin, self._stored.get((layer, role))
            for piece in () if item is None else self._source.pieces(item):
                yield first, piece
                first += len(piece)
            begin += self._rows[layer, role]

    def _report(self, count: int) -> None:
        self._loaded += count
        if self._progress is not None:
            self._progress(self._loaded, self._expected)


def _matrices_of(layer: LayerSpec) -> dict[str, tuple[str, ...]]:
    """Fields of a `Layer`, and the tensors that they are, one below the other, as far as there are such."""
    states: tuple[str, ...] = ("ssm_in", "shortconv.in_proj")
    if isinstance(layer.recurrence, DeltaNetSpec):
        states = ("attn_qkv", "attn_gate")
    return {
        "qkv": () if layer.attention is None else ("attn_q", "attn_k", "attn_v"),
        "output": ("attn_output",),
        "gate_up": ("ffn_gate", "ffn_up"),
        "down": ("ffn_down",),
        "input_gate": ("inp_gate",),
        "input_output": ("proj",),
        "states_input": states,
        "states_output": ("ssm_out", "shortconv.out_proj"),
    }


def _split_gate(layer: Layer, attention: AttentionSpec) -> None:
    """A file has the gate of each head behind its query; here gates are a matrix of their own."""
    if not attention.gated:
        return
    assert layer.qkv is not None
    heads = torch.arange(2 * attention.q_size, device=layer.qkv.device).view(attention.n_heads, 2, -1)
    behind = torch.arange(2 * attention.q_size, len(layer.qkv), device=layer.qkv.device)
    kept, gates = torch.cat((heads[:, 0].flatten(), behind)), heads[:, 1].flatten()
    layer.qkv, layer.gate = _rows(layer.qkv, kept), _rows(layer.qkv, gates)
    if layer.qkv_bias is not None:
        layer.qkv_bias, layer.gate_bias = layer.qkv_bias[kept], layer.qkv_bias[gates]
    if layer.scales is not None:
        layer.scales["qkv"], layer.scales["gate"] = layer.scales["qkv"][kept], layer.scales["qkv"][gates]


def _rows(matrix: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    if matrix.itemsize > 1:
        return matrix[chosen]
    return matrix.view(torch.uint8)[chosen].view(matrix.dtype)


def _reorder_heads(layer: Layer, attention: AttentionSpec) -> None:
    order = head_order(attention)
    if order is None:
        return
    turned = attention.q_size + (0 if attention.kv_from is not None else attention.k_size)
    of_qkv = (layer.qkv, layer.qkv_bias, None if layer.scales is None else layer.scales["qkv"])
    for rows in [each[:turned] for each in of_qkv if each is not None] + [layer.q_norm, layer.k_norm]:
        if rows is not None:
            reorder(rows, order)
