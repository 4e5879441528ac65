"""What chunks ask for besides logits: scores, some rows at a time, and pooled hidden states. All of it is queued on the
device; `fetch` waits for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cllm.backends.base import Chunk, Hidden, Pooling, PromptScores, Scoring, asks_more
from cllm.backends.torch.model import Model

_SCORED_VALUES = 1 << 25
"""Logits that there are of scored rows at the same time."""

Queued = dict[int, tuple[Tensor, ...]]


class Asked(NamedTuple):
    """A chunk that asks for more."""

    place: int
    rows: slice
    """Its tokens among those of the step, which begins with the single ones."""
    begins: bool
    """Whether it begins its text."""
    asks: Scoring | Pooling


def read_asks(chunks: Sequence[Chunk]) -> list[Asked]:
    if not asks_more(chunks):
        return []
    asked, first = [], 0
    for index in sorted(range(len(chunks)), key=lambda each: len(chunks[each].tokens) > 1):
        chunk = chunks[index]
        rows = slice(first, first + len(chunk.tokens))
        first = rows.stop
        if chunk.asks is not None:
            asked.append(Asked(index, rows, chunk.start == 0, chunk.asks))
    return asked


def read_states(model: Model, states: Tensor, asked: Sequence[Asked]) -> Queued:
    queued: Queued = {}
    for index, rows, begins, asks in asked:
        if isinstance(asks, Scoring):
            queued[index] = _scores(model, states[rows][: len(asks.targets)], asks)
        else:
            queued[index] = (_pooled(states[rows], begins, asks),)
    return queued


def fetch(queued: Queued) -> Mapping[int, PromptScores | Hidden]:
    read: dict[int, PromptScores | Hidden] = {}
    for index, tensors in queued.items():
        arrays = [tensor.cpu().numpy() for tensor in tensors]
        read[index] = PromptScores(*arrays) if len(arrays) > 1 else arrays[0]
    return read


def _scores(model: Model, states: Tensor, asked: Scoring) -> tuple[Tensor, ...]:
    targets = torch.from_numpy(np.array(asked.targets, np.int64)).to(states.device)
    at_once = max(1, _SCORED_VALUES // model.spec.n_vocab)
    parts = [
        _score_rows(model.logits(states[start : start + at_once]), targets[start : start + at_once], asked.top)
        for start in range(0, len(states), at_once)
    ]
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def _score_rows(logits: Tensor, targets: Tensor, top: int) -> tuple[Tensor, ...]:
    chosen = logits.gather(1, targets[:, None])
    totals = torch.logsumexp(logits.double(), dim=1, keepdim=True)
    ranks = 1 + (logits > chosen).sum(dim=1)
    values, ids = logits.topk(min(top, logits.shape[1]), dim=1)
    logprobs = values.double() - totals
    missing = ~torch.isfinite(logprobs)
    return (
        (chosen.double() - totals)[:, 0],
        ranks.int(),
        ids.int().masked_fill(missing, -1),
        logprobs.masked_fill(missing, 0.0),
    )


def _pooled(states: Tensor, begins: bool, asked: Pooling) -> Tensor:
    if asked.kind == "last":
        return states[-1].double()
    before = torch.zeros(states.shape[1], dtype=torch.float64, device=states.device)
    if asked.before is not None:
        before = torch.from_numpy(asked.before).to(states.device)
    if asked.kind == "mean":
        return before + states.double().sum(dim=0)
    return before + states[0].double() if begins else before
