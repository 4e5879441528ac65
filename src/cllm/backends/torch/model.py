"""One step through the model: embeddings, layers, logits of the rows that want them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import StepBatch
from cllm.backends.torch.operations import FusedProduct, Operations
from cllm.backends.torch.rotations import rotation_table
from cllm.models.spec import ModelSpec


@dataclass(slots=True)
class Layer:
    attention_norm: Tensor
    qkv: Tensor
    """Queries, keys and values, one below the other."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor
    scales: dict[str, Tensor] | None = None
    """Scales of the rows of each weight in fp8: qkv, output, gate_up, down."""
    output_bias: Tensor | None = None

    def scales_of(self, name: str) -> Tensor | None:
        return None if self.scales is None else self.scales[name]


@dataclass(slots=True)
class Weights:
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor
    """The embedding itself where the model ties them, unless the head is in fp8."""
    head_scales: Tensor | None = None


class Model:
    """With `invariant`, a token's logits are the same to the bit whatever else is in the step, whatever its chunk."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, operations: Operations, positions: int, *, invariant: bool = False
    ) -> None:
        self.spec = spec
        self.weights = weights
        self._ops = operations.invariant() if invariant else operations
        rotation = spec.layers[0].attention.rotation  # equal in all layers, so far
        assert rotation is not None
        self._rotations = rotation_table(rotation, positions).to(weights.embedding.device)

    @property
    def shares(self) -> bool:
        """Whether decode steps gain by knowing what rows share."""
        return self._ops.shares

    def forward(self, batch: StepBatch, arena: Arena, before_layer: Callable[[], None] | None = None) -> Tensor:
        """Logits, [wanted, vocabulary]. K and V of all tokens are in the arena afterwards.

        `before_layer` may end the step by raising.
        """
        if self._ops.one_row is not None and len(batch.tokens) == 1:
            return self._forward_one(self._ops.one_row, batch, arena)
        return self.logits(self.states(batch, arena, before_layer)[batch.wanted.long()])

    def logits(self, states: Tensor) -> Tensor:
        return self._ops.linear(states, self.weights.head, self.weights.head_scales).float()

    def states(self, batch: StepBatch, arena: Arena, before_layer: Callable[[], None] | None = None) -> Tensor:
        """The hidden states of all tokens, after the last norm."""
        ops, eps, weights = self._ops, self.spec.rms_eps, self.weights
        residual = functional.embedding(batch.tokens, weights.embedding)
        x = ops.rms_norm(residual, weights.layers[0].attention_norm, eps)
        for index, layer in enumerate(weights.layers):
            if before_layer is not None:
                before_layer()
            x = self._attention(layer, index, x, batch, arena)
            x = ops.add_rms_norm(x, residual, layer.ffn_norm, eps)
            x = ops.silu_multiply(ops.linear(x, layer.gate_up, layer.scales_of("gate_up")))
            x = ops.linear(x, layer.down, layer.scales_of("down"))
            last = index + 1 == len(weights.layers)
            x = ops.add_rms_norm(x, residual, weights.norm if last else weights.layers[index + 1].attention_norm, eps)
        return x

    def _attention(self, layer: Layer, index: int, x: Tensor, batch: StepBatch, arena: Arena) -> Tensor:
        ops = self._ops
        qkv = ops.linear(x, layer.qkv, layer.scales_of("qkv"), layer.qkv_bias)
        q = ops.rotate_and_store(qkv, layer.q_norm, layer.k_norm, self.spec, self._rotations, batch, arena, index)
        attended = ops.attend(q, arena, index, batch).flatten(1)
        return ops.linear(attended, layer.output, layer.scales_of("output"), layer.output_bias)

    def _forward_one(self, product: FusedProduct, batch: StepBatch, arena: Arena) -> Tensor:
        """The same for a single token; a norm or an activation is part of the product it belongs to."""
        ops, eps, weights = self._ops, self.spec.rms_eps, self.weights
        residual: Tensor | None = None
        x = functional.embedding(batch.tokens, weights.embedding)
        for index, layer in enumerate(weights.layers):
            scales = layer.scales_of
            norms = {"norm": layer.attention_norm, "eps": eps}
            qkv, sums = product(x, layer.qkv, scales=scales("qkv"), bias=layer.qkv_bias, residual=residual, **norms)
            residual = x if sums is None else sums
            q = ops.rotate_and_store(qkv, layer.q_norm, layer.k_norm, self.spec, self._rotations, batch, arena, index)
            x = ops.attend(q, arena, index, batch).flatten(1)
            x, _ = product(x, layer.output, scales=scales("output"), bias=layer.output_bias)
            norms = {"norm": layer.ffn_norm, "eps": eps}
            x, residual = product(x, layer.gate_up, scales=scales("gate_up"), residual=residual, gated=True, **norms)
            x, _ = product(x, layer.down, scales=scales("down"))
        norms = {"norm": weights.norm, "eps": eps}
        logits, _ = product(x, weights.head, scales=weights.head_scales, residual=residual, **norms)
        return logits[: len(batch.wanted)].float()
