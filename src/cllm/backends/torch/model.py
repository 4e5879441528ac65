"""One step through the model: embeddings, layers, logits of the rows that want them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cllm.backends.torch.arena import Arena, LayerMemory
from cllm.backends.torch.batch import StepBatch
from cllm.backends.torch.operations import FusedProduct, Operations
from cllm.backends.torch.recurrences import Recurrence
from cllm.backends.torch.reference import Attention, activate
from cllm.backends.torch.rotations import rotation_table, temperature_table
from cllm.backends.torch.state_memory import StateMemory
from cllm.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec


@dataclass(slots=True, kw_only=True)
class Layer:
    """What a layer does not have is None."""

    qkv: Tensor | None = None
    """Queries, keys and values, one below the other."""
    output: Tensor | None = None
    gate_up: Tensor | None = None
    """Without a gate, the other half alone."""
    down: Tensor | None = None
    gate: Tensor | None = None
    """What multiplies what heads give, if anything does."""
    gate_bias: Tensor | None = None
    recurrence: Recurrence | None = None
    states_input: Tensor | None = None
    states_rates: Tensor | None = None
    """How much of each head the delta rule changes, and how fast it fades; as precise as values are."""
    states_output: Tensor | None = None
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    attention_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None
    ffn_norm: Tensor | None = None
    ffn_post_norm: Tensor | None = None
    input_gate: Tensor | None = None
    input_output: Tensor | None = None
    input_norm: Tensor | None = None
    output_scale: Tensor | None = None
    scales: dict[str, Tensor] | None = None
    """Scales of the rows of each weight in fp8, by its name here."""

    def scales_of(self, name: str) -> Tensor | None:
        return None if self.scales is None else self.scales[name]


@dataclass(slots=True)
class LayerInputs:
    """What gives every layer an input of its own for each token."""

    embedding: Tensor
    projection: Tensor
    norm: Tensor
    scales: Tensor | None = None


@dataclass(slots=True)
class Weights:
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor
    """The embedding itself where the model ties them, unless the head is in fp8."""
    head_scales: Tensor | None = None
    inputs: LayerInputs | None = None


class Model:
    """With `invariant`, a token's logits are the same to the bit whatever else is in the step, whatever its chunk."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, operations: Operations, positions: int, *, invariant: bool = False
    ) -> None:
        self.spec = spec
        self.weights = weights
        self._ops = operations.invariant() if invariant else operations
        self._one_row = self._ops.one_row if is_plain(spec) else None
        self._attention = _attentions(spec, weights, positions)

    @property
    def shares(self) -> bool:
        """Whether decode steps gain by knowing what rows share."""
        return self._ops.shares

    def forward(self, batch: StepBatch, arena: Arena, before_layer: Callable[[], None] | None = None) -> Tensor:
        """Logits, [wanted, vocabulary]. K and V of all tokens are in the arena afterwards.

        `before_layer` may end the step by raising.
        """
        if self._one_row is not None and len(batch.tokens) == 1:
            return self._forward_one(self._one_row, batch, arena)
        return self.logits(self.states(batch, arena, before_layer)[batch.wanted.long()])

    def logits(self, states: Tensor) -> Tensor:
        spec = self.spec
        logits = self._ops.linear(states, self.weights.head, self.weights.head_scales).float()
        if spec.logit_scale != 1.0:
            logits *= spec.logit_scale
        return torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap if spec.logit_softcap else logits

    def states(self, batch: StepBatch, arena: Arena, before_layer: Callable[[], None] | None = None) -> Tensor:
        """The hidden states of all tokens, after the last norm."""
        weights, layers = self.weights, self.weights.layers
        residual = self._embed(batch.tokens)
        inputs = None if weights.inputs is None else self._layer_inputs(batch.tokens, residual, weights.inputs)
        x = self._normed(residual, _first_norm(layers[0]))
        for index, (layer, spec) in enumerate(zip(layers, self.spec.layers, strict=True)):
            if before_layer is not None:
                before_layer()
            following = weights.norm if index + 1 == len(layers) else _first_norm(layers[index + 1])
            ends = inputs is None and layer.output_scale is None
            last = following if ends else None
            if spec.attention is not None or layer.recurrence is not None:
                x = self._mix(index, x, batch, arena)
                behind = last if spec.feed_forward is None else layer.ffn_norm
                x = self._join(x, residual, layer.attention_post_norm, behind)
            if spec.feed_forward is not None:
                x = self._join(self._feed(layer, spec.feed_forward, x), residual, layer.ffn_post_norm, last)
            if ends:
                continue
            if inputs is not None:
                residual += self._input(layer, spec, residual, inputs[:, index])
            if layer.output_scale is not None:
                residual *= layer.output_scale
            x = self._normed(residual, following)
        return x

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded, scale = functional.embedding(tokens, self.weights.embedding), self.spec.embedding_scale
        return embedded if scale == 1.0 else embedded * scale

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._ops.rms_norm(x, weight, self.spec.rms_eps)

    def _join(self, x: Tensor, residual: Tensor, own_norm: Tensor | None, following: Tensor | None) -> Tensor:
        """`residual` becomes x + residual; what the next matrices begin with is returned."""
        x, scale = self._normed(x, own_norm), self.spec.residual_scale
        if scale != 1.0:
            x = x * scale
        if following is not None:
            return self._ops.add_rms_norm(x, residual, following, self.spec.rms_eps)
        residual += x
        return residual

    def _mix(self, index: int, x: Tensor, batch: StepBatch, arena: Arena) -> Tensor:
        """What a layer takes from the tokens before: by attention, by a state, or by both."""
        layer, found = self.weights.layers[index], None
        if (attention := self._attention[index]) is not None:
            found = self._attend(layer, attention, x, batch, arena.layers[index])
        if layer.recurrence is None:
            assert found is not None
            return found
        carried = self._recur(layer, layer.recurrence, x, batch, arena.states[index])
        return carried if found is None else found + carried

    def _feed(self, layer: Layer, spec: FeedForwardSpec, x: Tensor) -> Tensor:
        ops = self._ops
        assert layer.gate_up is not None and layer.down is not None
        x = ops.linear(x, layer.gate_up, layer.scales_of("gate_up"))
        x = ops.gate_multiply(x, spec.activation) if spec.gated else activate(x, spec.activation)
        return ops.linear(x, layer.down, layer.scales_of("down"))

    def _recur(self, layer: Layer, recurrence: Recurrence, x: Tensor, batch: StepBatch, memory: StateMemory) -> Tensor:
        ops = self._ops
        assert layer.states_input is not None and layer.states_output is not None and batch.states is not None
        given = ops.linear(x, layer.states_input, layer.scales_of("states_input"))
        if layer.states_rates is not None:
            given = torch.cat((given, ops.linear(x, layer.states_rates, None)), dim=1)
        given = ops.recur(given, recurrence, batch.states, memory)
        return ops.linear(given, layer.states_output, layer.scales_of("states_output"))

    def _attend(self, layer: Layer, attention: Attention, x: Tensor, batch: StepBatch, memory: LayerMemory) -> Tensor:
        ops = self._ops
        assert layer.qkv is not None and layer.output is not None
        batch = batch.over(memory.table)
        qkv = ops.linear(x, layer.qkv, layer.scales_of("qkv"), layer.qkv_bias)
        q = ops.rotate_and_store(qkv, attention, batch, memory)
        attended = ops.attend(q, attention, batch, memory).flatten(1)
        if layer.gate is not None:
            attended = attended * torch.sigmoid(ops.linear(x, layer.gate, layer.scales_of("gate"), layer.gate_bias))
        return ops.linear(attended, layer.output, layer.scales_of("output"), layer.output_bias)

    def _layer_inputs(self, tokens: Tensor, embedded: Tensor, weights: LayerInputs) -> Tensor:
        """[tokens, layers, values]: of a projection of what all layers get, and of an embedding for them alone."""
        shape = len(tokens), self.spec.n_layers, self.spec.layer_input_size
        projected = self._ops.linear(embedded, weights.projection, weights.scales) * self.spec.n_embd**-0.5
        projected = self._normed(projected.view(-1, shape[2]), weights.norm).view(shape)
        own = functional.embedding(tokens, weights.embedding).view(shape) * shape[2] ** 0.5
        return (projected + own) * 2**-0.5

    def _input(self, layer: Layer, spec: LayerSpec, residual: Tensor, own: Tensor) -> Tensor:
        """What a layer adds because of its own input."""
        assert layer.input_gate is not None and layer.input_output is not None
        ops = self._ops
        gate = ops.linear(residual, layer.input_gate, layer.scales_of("input_gate"))
        gated = ops.gate_multiply(torch.cat((gate, own), dim=1), spec.feeds.activation)
        return self._normed(ops.linear(gated, layer.input_output, layer.scales_of("input_output")), layer.input_norm)

    def _forward_one(self, product: FusedProduct, batch: StepBatch, arena: Arena) -> Tensor:
        """The same for a single token; a norm or an activation is part of the product it belongs to."""
        ops, eps, weights = self._ops, self.spec.rms_eps, self.weights
        residual: Tensor | None = None
        x = functional.embedding(batch.tokens, weights.embedding)
        for index, layer in enumerate(weights.layers):
            scales, attention, memory = layer.scales_of, self._attention[index], arena.layers[index]
            assert attention is not None and layer.qkv is not None and layer.output is not None
            assert layer.gate_up is not None and layer.down is not None
            norms: Any = {"norm": layer.attention_norm, "eps": eps}
            qkv, sums = product(x, layer.qkv, scales=scales("qkv"), bias=layer.qkv_bias, residual=residual, **norms)
            residual = x if sums is None else sums
            x = ops.attend(ops.rotate_and_store(qkv, attention, batch, memory), attention, batch, memory).flatten(1)
            x, _ = product(x, layer.output, scales=scales("output"), bias=layer.output_bias)
            norms = {"norm": layer.ffn_norm, "eps": eps}
            x, residual = product(x, layer.gate_up, scales=scales("gate_up"), residual=residual, gated=True, **norms)
            x, _ = product(x, layer.down, scales=scales("down"))
        norms = {"norm": weights.norm, "eps": eps}
        logits, _ = product(x, weights.head, scales=weights.head_scales, residual=residual, **norms)
        return logits[: len(batch.wanted)].float()


def is_plain(spec: ModelSpec) -> bool:
    """Whether this is a decoder like Llama, or like Qwen 3 with its norms of queries and keys."""
    if any(layer.attention is None or layer.feed_forward is None for layer in set(spec.layers)):
        return False
    return replace(spec, layers=tuple(map(_plain, spec.layers))) == ModelSpec(
        *(spec.architecture, spec.n_embd, spec.n_vocab, spec.context_length, spec.layers, spec.rms_eps, spec.tied)
    )


def _plain(layer: LayerSpec) -> LayerSpec:
    own = layer.attends
    sizes = own.n_heads, own.n_kv_heads, own.head_dim_k, own.head_dim_k
    biases = own.qkv_bias, own.output_bias
    attention = AttentionSpec(*sizes, own.rotation, *biases, "head" if own.qk_norm == "head" else "")
    return LayerSpec(attention, FeedForwardSpec(layer.feeds.size))


def _first_norm(layer: Layer) -> Tensor | None:
    """What a layer begins with: its feed-forward's, if it is that alone."""
    return layer.ffn_norm if layer.qkv is None and layer.recurrence is None else layer.attention_norm


def _attentions(spec: ModelSpec, weights: Weights, positions: int) -> list[Attention | None]:
    """Layers that turn alike share a table."""
    device = weights.embedding.device
    tables: dict[object, Tensor] = {}

    def table(key: object, make: Callable[[], Tensor]) -> Tensor:
        if key not in tables:
            tables[key] = make().to(device)
        return tables[key]

    made: list[Attention | None] = []
    for layer, own in zip(weights.layers, (layer.attention for layer in spec.layers), strict=True):
        if own is None:
            made.append(None)
            continue
        rotation, dim, temperature = own.rotation, own.head_dim_k, own.temperature
        rotations = table((rotation, dim), lambda: rotation_table(rotation, dim, positions))  # noqa: B023
        factors = None
        if temperature is not None:
            factors = table(temperature, lambda: temperature_table(temperature, positions))  # noqa: B023
        made.append(Attention(own, spec.rms_eps, rotations, factors, layer.q_norm, layer.k_norm, layer.sinks))
    return made
