"""Layers that carry a state, on a GPU: the rules as one kernel, the rest as plain torch has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cllm.backends.torch.recurrences import Recurrence, Rule, compute, delta_rule
from cllm.backends.torch.state_batch import StateBatch, Turns
from cllm.backends.torch.state_kernels import advance_kernel
from cllm.backends.torch.state_memory import StateMemory

VALUES_TILE = 16

Norm = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(slots=True)
class _Carried:
    inputs: Tensor
    batch: StateBatch
    memory: StateMemory
    norm: Norm

    @property
    def turns(self) -> Turns | None:
        return self.batch.turns

    def advance(self, rule: Rule, given: tuple[Tensor, ...]) -> Tensor:
        batch, memory = self.batch, self.memory
        q, k, v, fades, *rates = (part.contiguous() for part in given)
        heads, values, keys = memory.heads.shape
        tile = min(VALUES_TILE, triton.next_power_of_2(values))
        out = torch.empty_like(v)
        advance_kernel[(len(batch.reads), heads, triton.cdiv(values, tile))](
            *(q, k, v, fades, rates[0] if rates else fades, out, memory.arena, memory.places),
            *(batch.reads, batch.writes, batch.starts, memory.arena.stride(0), batch.reads.shape[1]),
            heads=heads,
            values=values,
            keys=keys,
            tile=tile,
            padded=triton.next_power_of_2(keys),
            delta=rule is delta_rule,
            num_warps=1,
        )
        return out

    def normed(self, x: Tensor, eps: float) -> Tensor:
        return self.norm(x, x.new_ones(x.shape[-1]), eps)


def recur(given: Tensor, recurrence: Recurrence, batch: StateBatch, memory: StateMemory, norm: Norm) -> Tensor:
    """As `recurrences.recur`. Whatever else is in the step, and however a text is cut, bits are the same."""
    carried = _Carried(memory.inputs.read(batch.reads, batch.fresh), batch, memory, norm)
    out = compute(given.float(), recurrence, carried)
    memory.inputs.write(batch.writes, carried.inputs)
    return out.to(given.dtype)
