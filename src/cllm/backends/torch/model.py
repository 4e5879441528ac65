"""One step through the model: embeddings, layers, logits of the rows that want them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import StepBatch
from cllm.backends.torch.decoder import Decoder
from cllm.backends.torch.operations import Operations


@dataclass(slots=True)
class Layer:
    attention_norm: torch.Tensor
    qkv: torch.Tensor
    """Queries, keys and values, one below the other."""
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    scales: dict[str, torch.Tensor] | None = None
    """Of each row of a weight in fp8."""
    output_bias: torch.Tensor | None = None


@dataclass(slots=True)
class Weights:
    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor
    """The embedding itself where the model ties them."""
    head_scales: torch.Tensor | None = None


class Model:
    def __init__(
        self, decoder: Decoder, weights: Weights, operations: Operations, positions: int, *, invariant: bool = False
    ) -> None:
        self.decoder = decoder
        self.weights = weights
        self._ops = operations
        self.fuses = False
        self._rotations = decoder.rotations(positions).to(weights.embedding.device)

    def forward(self, batch: StepBatch, arena: Arena, before_layer: Callable[[], None] | None = None) -> torch.Tensor:
        """Logits, [wanted, vocabulary]. K and V of all tokens are in the arena afterwards.

        `before_layer` may end the step by raising.
        """
        ops, eps, weights = self._ops, self.decoder.rms_eps, self.weights
        if self.fuses and len(batch.tokens) == 1:
            return self._forward_one(batch, arena)
        residual = functional.embedding(batch.tokens, weights.embedding)
        x = ops.rms_norm(residual, weights.layers[0].attention_norm, eps)
        for index, layer in enumerate(weights.layers):
            if before_layer is not None:
                before_layer()
            x = self._attention(layer, index, x, batch, arena)
            x = ops.add_rms_norm(x, residual, layer.ffn_norm, eps)
            x = functional.linear(ops.silu_multiply(functional.linear(x, layer.gate_up)), layer.down)
            last = index + 1 == len(weights.layers)
            x = ops.add_rms_norm(x, residual, weights.norm if last else weights.layers[index + 1].attention_norm, eps)
        return functional.linear(x[batch.wanted.long()], weights.head).float()

    def _forward_one(self, batch: StepBatch, arena: Arena) -> torch.Tensor:
        from cllm.backends.torch.skinny import gemv

        ops, eps, weights, decoder = self._ops, self.decoder.rms_eps, self.weights, self.decoder
        residual: torch.Tensor | None = None
        x = functional.embedding(batch.tokens, weights.embedding)
        for index, layer in enumerate(weights.layers):
            scales = layer.scales or {}
            qkv, sums = gemv(
                x,
                layer.qkv,
                bias=layer.qkv_bias,
                residual=residual,
                norm=layer.attention_norm,
                eps=eps,
                scales=scales.get("qkv"),
            )
            residual = x if sums is None else sums
            q = ops.rotate_and_store(qkv, layer.q_norm, layer.k_norm, decoder, self._rotations, batch, arena, index)
            x, _ = gemv(
                ops.attend(q, arena, index, batch).view(1, decoder.q_size), layer.output, scales=scales.get("output")
            )
            x, residual = gemv(
                x,
                layer.gate_up,
                residual=residual,
                norm=layer.ffn_norm,
                eps=eps,
                gated=True,
                scales=scales.get("gate_up"),
            )
            x, _ = gemv(x, layer.down, scales=scales.get("down"))
        logits, _ = gemv(x, weights.head, residual=residual, norm=weights.norm, eps=eps, scales=weights.head_scales)
        return logits[: len(batch.wanted)].float()

    def _attention(self, layer: Layer, index: int, x: torch.Tensor, batch: StepBatch, arena: Arena) -> torch.Tensor:
        decoder = self.decoder
        qkv = functional.linear(x, layer.qkv, layer.qkv_bias)
        q = self._ops.rotate_and_store(qkv, layer.q_norm, layer.k_norm, decoder, self._rotations, batch, arena, index)
        attended = self._ops.attend(q, arena, index, batch)
        return functional.linear(attended.view(len(x), decoder.q_size), layer.output, layer.output_bias)
