"""One step of a backend that leaves it to the host to choose tokens."""

from __future__ import annotations

from collections.abc import Sequence

from cllm.backends.base import Backend, Chunk, Logits, StepResult


def step_of(backend: Backend, chunks: Sequence[Chunk]) -> StepResult:
    return backend.collect(chunks)


def rows_of(backend: Backend, chunks: Sequence[Chunk]) -> Logits:
    logits = step_of(backend, chunks).logits
    assert logits is not None
    return logits
