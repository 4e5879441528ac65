"""Choosing tokens in plain torch, in float64: the reference for the kernels, and what runs where there is no GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from cllm.backends.torch.batch import plain_prepare
from cllm.backends.torch.sampling import Penalties, Sampler, TokenBiases

_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
_FLOAT32_MAX = torch.finfo(torch.float32).max


class PlainSampler(Sampler):
    prepare = staticmethod(plain_prepare)

    def bias(self, logits: Tensor, listed: TokenBiases) -> None:
        starts = listed.starts.tolist()
        for row, first, end in zip(logits, starts, starts[1:], strict=False):
            ids = listed.ids[first:end].long()
            row[ids] = (row[ids].double() + listed.values[first:end]).float()

    def penalise(self, logits: Tensor, seen: Penalties, last: Tensor) -> None:
        starts = seen.starts.tolist()
        rates, follows = seen.rates.tolist(), seen.follows.tolist()
        for number, row in enumerate(logits):
            ids, counts = (part[starts[number] : starts[number + 1]].long() for part in (seen.ids, seen.counts))
            if follows[number] >= 0:
                unknown = last[follows[number]].long()
                if bool((ids == unknown).any()):
                    counts = counts + (ids == unknown)
                else:
                    ids, counts = torch.cat([ids, unknown[None]]), torch.cat([counts, torch.ones_like(unknown[None])])
            row[ids] = _penalised(row[ids].double(), counts, *rates[number])

    def choose(self, logits: Tensor, params: Tensor | None, owners: Tensor, last: Tensor) -> Tensor:
        numbers = [(0.0, 0.0, 1.0, 0.0, 0.0)] * len(logits) if params is None else params.tolist()
        tokens = torch.tensor(
            [_choose(row, *each) for row, each in zip(logits, numbers, strict=True)], dtype=torch.int32
        )
        owned = owners >= 0
        last[owners[owned].long()] = tokens[owned].clamp(min=0)
        return tokens


def _penalised(values: Tensor, counts: Tensor, repetition: float, frequency: float, presence: float) -> Tensor:
    less = torch.where(values > 0, values / repetition, values * repetition)
    less = less - torch.where(counts > 0, frequency * counts.double() + presence, 0.0)
    return torch.where(values == torch.inf, values, less.clamp(max=_FLOAT32_MAX)).float()


def _choose(values: Tensor, temperature: float, top_k: float, top_p: float, min_p: float, uniform: float) -> int:
    peak = values.max()
    if not bool(peak.isfinite()):
        return -1
    if temperature == 0.0:
        return int((values == peak).nonzero()[0])
    weights = ((values.double() - peak) / max(temperature, _SMALLEST_TEMPERATURE)).exp()
    ids = (values + 0.0).sort(descending=True, stable=True).indices
    if 0 < top_k < len(values):
        ids = ids[: int(top_k)]
    heaviest_first = weights[ids].cumsum(0)
    if top_p < 1.0:
        ids = ids[: int(torch.searchsorted(heaviest_first, top_p * heaviest_first[-1])) + 1]
    ids = ids[weights[ids] >= min_p].sort().values
    running = weights[ids].cumsum(0)
    place = int(torch.searchsorted(running, uniform * running[-1], right=True))
    return int(ids[min(place, int(torch.searchsorted(running, running[-1])))])
