"""The operations a step is made of: kernels on a GPU, plain torch elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from cllm.backends.torch import linear, reference
from cllm.backends.torch.arena import LayerMemory
from cllm.backends.torch.batch import StepBatch
from cllm.backends.torch.recurrences import Recurrence, recur
from cllm.backends.torch.reference import Attention
from cllm.backends.torch.state_batch import StateBatch
from cllm.backends.torch.state_memory import StateMemory
from cllm.models.spec import Activation


class FusedProduct(Protocol):
    """A product with one row, the norm before it and the activation after it in one operation."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        scales: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The product, and x + residual if there is one. `gated`: silu of the first half times the second."""


class Operations(ABC):
    one_row: FusedProduct | None = None
    """For steps of a single token, where there is such a thing."""
    shares = False
    """Whether what decode rows share is read once, if the batch says what that is."""

    @abstractmethod
    def invariant(self) -> Operations:
        """Operations that give a token the same result, to the bit, whatever else is computed with it."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Times the transpose of the weight; `scales` are those of its rows, if it is in fp8."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual` becomes x + residual; its norm is returned."""

    @abstractmethod
    def gate_multiply(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """The activation of the first half times the second."""

    @abstractmethod
    def rotate_and_store(self, qkv: Tensor, attention: Attention, batch: StepBatch, memory: LayerMemory) -> Tensor:
        """Keys are rotated and written to the arena, as values are. Gives the rotated queries, [tokens, heads, dim]."""

    @abstractmethod
    def attend(self, q: Tensor, attention: Attention, batch: StepBatch, memory: LayerMemory) -> Tensor: ...

    @abstractmethod
    def recur(self, given: Tensor, recurrence: Recurrence, batch: StateBatch, memory: StateMemory) -> Tensor:
        """What a layer's states make of what its input matrices gave, for its output matrix. They are brought up to
        date."""


class PlainOperations(Operations):
    """In torch alone."""

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone

    def invariant(self) -> Operations:
        return PlainOperations(alone=True)

    def linear(self, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None = None) -> Tensor:
        product = linear.linear_by_row if self._alone else linear.linear
        return product(x, weight, scales, bias)

    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    gate_multiply = staticmethod(reference.gate_multiply)
    rotate_and_store = staticmethod(reference.rotate_and_store)

    def attend(self, q: Tensor, attention: Attention, batch: StepBatch, memory: LayerMemory) -> Tensor:
        return reference.attend(q, attention, batch, memory, alone=self._alone)

    def recur(self, given: Tensor, recurrence: Recurrence, batch: StateBatch, memory: StateMemory) -> Tensor:
        return recur(given, recurrence, batch, memory, alone=self._alone)
