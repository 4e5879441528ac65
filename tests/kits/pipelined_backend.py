"""The fake backend as one that computes ahead: it chooses tokens itself and tells them a step later.

A step has its effect when it is submitted, as a device that does everything in order would let it seem.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import numpy_sampler as host
from cllm.backends.base import BackendTraits, Chunk, Draw, Drawn, Seen, StepResult
from cllm.backends.fake import FakeBackend
from cllm.errors import BackendError


class PipelinedFake(FakeBackend):
    traits = BackendTraits("fake", depth=2)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._last: dict[int, int] = {}
        self._tickets = itertools.count()
        self._under_way: dict[int, StepResult | BackendError] = {}

    def submit(self, chunks: Sequence[Chunk]) -> int:
        ticket = next(self._tickets)
        self._under_way[ticket] = self._result_of([self._known(chunk) for chunk in chunks])
        return ticket

    def collect(self, ticket: int) -> StepResult:  # type: ignore[override]
        result = self._under_way.pop(ticket)
        if isinstance(result, BackendError):
            raise result
        return result

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def rebuild(self) -> None:
        self._under_way.clear()
        super().rebuild()

    def _known(self, chunk: Chunk) -> Chunk:
        return replace(chunk, tokens=array("i", [self._last.get(chunk.row, 0)])) if chunk.follows else chunk

    def _result_of(self, chunks: list[Chunk]) -> StepResult | BackendError:
        try:
            result = super().collect(chunks)
        except BackendError as error:
            return error
        assert result.logits is not None
        logits = result.logits
        drawn: list[list[Drawn]] = []
        for row, chunk in zip(logits, (chunk for chunk in chunks if chunk.wanted_logits), strict=True):
            unknown = chunk.tokens[0] if chunk.follows else None
            drawn.append([_choose(row, draw, unknown) for draw in chunk.draws])
            self._last[chunk.row] = drawn[-1][0].token_id
        return StepResult(None, drawn, result.read)


def _choose(logits: NDArray[np.float32], draw: Draw, unknown: int | None) -> Drawn:
    values = logits.copy()
    if draw.mask is not None:
        values = host.masked(values, draw.mask)
    if draw.bias is not None:
        values[draw.bias.ids] = values[draw.bias.ids] + draw.bias.values
    if draw.penalties is not None:
        _penalise(values, draw.penalties, unknown)
    best = host.argmax(values)
    peak = float(values[best])
    if not np.isfinite(peak):
        return Drawn(-1)
    token = best
    if draw.temperature > 0.0:
        options = {"temperature": draw.temperature, "top_p": draw.top_p, "min_p": draw.min_p}
        token = host.draw(values, peak, draw.uniform, top_k=min(draw.top_k, len(values)), **options)
    if draw.logprobs is None:
        return Drawn(token)
    total = host.log_total(logits, float(logits.max()))
    ids = host.largest(logits, draw.logprobs) if draw.logprobs else np.empty(0, np.intp)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    return Drawn(token, float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in ids))


def _penalise(values: NDArray[np.float32], seen: Seen, unknown: int | None) -> None:
    counts = dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))
    if unknown is not None:
        counts[unknown] = counts.get(unknown, 0) + 1
    for token, count in counts.items():
        value = float(values[token])
        value = value / seen.repetition if value > 0 else value * seen.repetition
        drop = seen.frequency * count + seen.presence if count else 0.0
        values[token] = min(value - drop, float(np.finfo(np.float32).max))
