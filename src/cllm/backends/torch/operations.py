"""The operations a step is made of, beside matrix products: kernels on a GPU, plain torch elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from cllm.backends.torch import twin
from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import StepBatch
from cllm.backends.torch.decoder import Decoder


class Operations(ABC):
    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    @abstractmethod
    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`residual` becomes x + residual; its norm is returned."""

    @abstractmethod
    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        decoder: Decoder,
        rotations: torch.Tensor,
        batch: StepBatch,
        arena: Arena,
        layer: int,
    ) -> torch.Tensor:
        """Keys are rotated and written to the arena, as values are. Gives the rotated queries, [tokens, heads, dim]."""

    @abstractmethod
    def attend(self, q: torch.Tensor, arena: Arena, layer: int, batch: StepBatch) -> torch.Tensor: ...


class PlainOperations(Operations):
    """In torch alone."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return twin.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return twin.add_rms_norm(x, residual, weight, eps)

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        return twin.silu_multiply(gate_up)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        decoder: Decoder,
        rotations: torch.Tensor,
        batch: StepBatch,
        arena: Arena,
        layer: int,
    ) -> torch.Tensor:
        q, k, v = (
            part.view(len(qkv), -1, decoder.head_dim)
            for part in qkv.split([decoder.q_size, decoder.kv_size, decoder.kv_size], dim=1)
        )
        if q_norm is not None and k_norm is not None:
            q, k = twin.rms_norm(q, q_norm, decoder.rms_eps), twin.rms_norm(k, k_norm, decoder.rms_eps)
        turned = rotations[batch.positions.long()]
        twin.store(twin.rotate(k, turned), v, arena, layer, batch.slots)
        return twin.rotate(q, turned)

    def attend(self, q: torch.Tensor, arena: Arena, layer: int, batch: StepBatch) -> torch.Tensor:
        return twin.attend(q, arena, layer, batch)
