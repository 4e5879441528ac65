"""Layers that carry a state, in plain torch: a convolution over the last inputs, then a rule that moves a matrix of
every head on, token by token.

States are float32, as is all that is computed with them. Tokens of different rows go through the rule together, those
of a row one after another, so that it does not matter how a text is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from cllm.backends.torch.state_batch import StateBatch, Turns
from cllm.backends.torch.state_memory import StateMemory
from cllm.models.spec import DeltaNetSpec, Mamba2Spec, RecurrenceSpec, ShortConvSpec

Rule = Callable[..., Tensor]
"""Brings states, [rows, heads, values, keys], up to date with one token of each row, and says what that gives."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What a layer's recurrence is computed with, besides the matrices before and behind it: all float32."""

    spec: RecurrenceSpec
    eps: float
    taps: Tensor
    """[kernel, channels]: what the convolution multiplies inputs with, the oldest token's first"""
    conv_bias: Tensor | None = None
    decay: Tensor | None = None
    """[heads], below 0"""
    step_bias: Tensor | None = None
    skip: Tensor | None = None
    """[heads]: how much of a head's input is added to what it gives"""
    norm: Tensor | None = None


class Carried(Protocol):
    """The states of a step's rows, which are brought up to date."""

    inputs: Tensor
    """[rows, earlier tokens, channels]"""

    @property
    def turns(self) -> Turns | None:
        """None: every row is one token."""

    def advance(self, rule: Rule, given: tuple[Tensor, ...]) -> Tensor:
        """What each token gives, when those of a row go through the rule one after another."""

    def normed(self, x: Tensor, eps: float) -> Tensor: ...


def recur(given: Tensor, recurrence: Recurrence, batch: StateBatch, memory: StateMemory, *, alone: bool) -> Tensor:
    """What the output matrix is multiplied with, [tokens, values], from what the input matrices gave. States are read
    and written. `alone`: token by token, for the same bits whatever else is in the step."""
    heads, inputs = (part.read(batch.reads, batch.fresh) for part in (memory.heads, memory.inputs))
    carried, wide = _Carried(heads, inputs, batch.turns), given.float()
    out = (
        torch.cat(list(_one_by_one(wide, recurrence, batch, carried))) if alone else compute(wide, recurrence, carried)
    )
    memory.heads.write(batch.writes, carried.heads)
    memory.inputs.write(batch.writes, carried.inputs)
    return out.to(given.dtype)


def _one_by_one(given: Tensor, recurrence: Recurrence, batch: StateBatch, carried: _Carried) -> Iterator[Tensor]:
    for row, (first, end) in enumerate(batch.extents):
        own = _Carried(carried.heads[row : row + 1], carried.inputs[row : row + 1], None)
        for at in range(first, end):
            yield compute(given[at : at + 1], recurrence, own)
        carried.inputs[row] = own.inputs[0]


@dataclass(slots=True)
class _Carried:
    heads: Tensor
    """[rows, heads, values, keys]"""
    inputs: Tensor
    turns: Turns | None

    def advance(self, rule: Rule, given: tuple[Tensor, ...]) -> Tensor:
        """As many tokens together as there are rows that have one more."""
        turns = self.turns
        if turns is None:
            return rule(self.heads, *given)
        states = self.heads[turns.order]
        given = tuple(part[turns.tokens] for part in given)
        found, first = [], 0
        for count in turns.counts:
            found.append(rule(states[:count], *(part[first : first + count] for part in given)))
            first += count
        self.heads[turns.order] = states
        return torch.cat(found)[turns.back]

    def normed(self, x: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def compute(given: Tensor, recurrence: Recurrence, carried: Carried) -> Tensor:
    spec = recurrence.spec
    if isinstance(spec, DeltaNetSpec):
        return _delta_net(given, spec, recurrence, carried)
    if isinstance(spec, Mamba2Spec):
        return _mamba2(given, spec, recurrence, carried)
    assert isinstance(spec, ShortConvSpec)
    before, behind, x = given.split(spec.size, dim=1)
    return behind * _convolve(before * x, recurrence, carried)


def _delta_net(given: Tensor, spec: DeltaNetSpec, recurrence: Recurrence, carried: Carried) -> Tensor:
    heads, dim = spec.n_v_heads, spec.head_dim_k
    mixed, gate, rate, step = given.split([spec.conv_size, spec.v_size, heads, heads], dim=1)
    mixed = functional.silu(_convolve(mixed, recurrence, carried))
    q, k, v = mixed.split([spec.k_size, spec.k_size, spec.v_size], dim=1)
    # Vectors of length 1, but for `eps`, which is added to the squared length; queries are divided as in attention.
    q, k = (carried.normed(part.unflatten(1, (spec.n_k_heads, -1)), recurrence.eps / dim) for part in (q, k))
    numbers = torch.arange(heads, device=given.device)
    own = numbers % spec.n_k_heads if spec.tiled else numbers // (heads // spec.n_k_heads)
    q, k, v = (q / dim)[:, own], (k * dim**-0.5)[:, own], v.unflatten(1, (heads, -1))
    assert recurrence.decay is not None and recurrence.step_bias is not None and recurrence.norm is not None
    fade = torch.exp(recurrence.decay * functional.softplus(step + recurrence.step_bias))
    attended = carried.advance(delta_rule, (q, k, v, fade, rate.sigmoid()))
    normed = carried.normed(attended, recurrence.eps) * recurrence.norm
    return normed.flatten(1) * functional.silu(gate)


def _mamba2(given: Tensor, spec: Mamba2Spec, recurrence: Recurrence, carried: Carried) -> Tensor:
    heads, groups, between = spec.n_heads, spec.n_groups, spec.n_groups * spec.state_size
    gate, mixed, step = given.split([spec.inner_size, spec.conv_size, heads], dim=1)
    mixed = functional.silu(_convolve(mixed, recurrence, carried))
    x, b, c = mixed.split([spec.inner_size, between, between], dim=1)
    x = x.unflatten(1, (heads, -1))
    own = torch.arange(heads, device=given.device) // (heads // groups)
    b, c = (part.unflatten(1, (groups, -1))[:, own] for part in (b, c))
    assert recurrence.decay is not None and recurrence.step_bias is not None and recurrence.skip is not None
    step = functional.softplus(step + recurrence.step_bias)
    fade = torch.exp(step * recurrence.decay)
    found = carried.advance(scan_rule, (c, b, x * step[:, :, None], fade))
    gated = (found + x * recurrence.skip[:, None]).flatten(1) * functional.silu(gate)
    if recurrence.norm is None:
        return gated
    return carried.normed(gated.unflatten(1, (groups, -1)), recurrence.eps).flatten(1) * recurrence.norm


def _convolve(x: Tensor, recurrence: Recurrence, carried: Carried) -> Tensor:
    """Every channel over its last tokens. The inputs of the last ones are left for the tokens to come."""
    taps, turns = recurrence.taps, carried.turns
    if turns is None:
        seen = torch.cat((carried.inputs, x[:, None]), dim=1)
        inputs, carried.inputs = seen.unbind(1), seen[:, 1:]
    else:
        known = torch.cat((carried.inputs.flatten(0, 1), x))
        sources, left = turns.sources(len(taps))
        inputs, carried.inputs = tuple(known[place] for place in sources.unbind(1)), known[left]
    out = inputs[0] * taps[0]
    for each, tap in zip(inputs[1:], taps[1:], strict=True):
        out += each * tap
    return out if recurrence.conv_bias is None else out + recurrence.conv_bias


def delta_rule(states: Tensor, q: Tensor, k: Tensor, v: Tensor, fade: Tensor, rate: Tensor) -> Tensor:
    states *= fade[:, :, None, None]
    change = (v - (states * k[:, :, None]).sum(-1)) * rate[:, :, None]
    states.addcmul_(change[..., None], k[:, :, None])
    return (states * q[:, :, None]).sum(-1)


def scan_rule(states: Tensor, q: Tensor, k: Tensor, v: Tensor, fade: Tensor) -> Tensor:
    states *= fade[:, :, None, None]
    states.addcmul_(v[..., None], k[:, :, None])
    return (states * q[:, :, None]).sum(-1)
