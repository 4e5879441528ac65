"""How a piece of work is timed, the same way on every engine."""

from __future__ import annotations

import zlib
from array import array
from statistics import median
from time import perf_counter
from typing import Protocol

import numpy as np

from cllm_bench.kernels.works import Work

Tokens = array  # array("i", ids)


class Streams(Protocol):
    """Sequences that an engine holds. Positions count from 0, and all streams hold the same number of tokens."""

    def prompt(self, tokens: Tokens[int]) -> None:
        """Compute a prompt in the first stream, which then holds nothing else, to the logits of its last token."""

    def share(self) -> None:
        """Give what the first stream holds to all the others, each with K/V memory of its own."""

    def decode(self, tokens: Tokens[int], position: int) -> None:
        """One token of every stream at `position`, each to its logits."""

    def advance(self, tokens: Tokens[int], position: int) -> None:
        """Several tokens of the first stream from `position` on, each to its logits."""

    def rewind(self, position: int) -> None:
        """Forget what the streams hold from `position` on."""


def draw_tokens(count: int, seed: str, n_vocab: int) -> Tokens[int]:
    """The same tokens for every engine; no control tokens, which stand first in the vocabulary."""
    random = np.random.default_rng(zlib.crc32(seed.encode()))
    return array("i", random.integers(min(1000, n_vocab // 2), n_vocab, count, np.int32).tobytes())


def fill(streams: Streams, work: Work, n_vocab: int) -> None:
    """Every stream holds the work's context. Not timed."""
    streams.prompt(draw_tokens(work.context, work.key, n_vocab))
    streams.share()


def tokens_per_s(streams: Streams, work: Work, n_vocab: int) -> float:
    """One pass over streams that are filled. It leaves them as they were."""
    if not work.steps:
        return work.tokens / sum(_prompt_s(streams, work, n_vocab) for _ in range(work.rounds))
    return work.tokens / sum(sum(step_times(streams, work, n_vocab)) for _ in range(work.rounds))


def step_times(streams: Streams, work: Work, n_vocab: int) -> list[float]:
    """Seconds of each decode step, one after another from the work's context on."""
    count = work.streams * work.rows
    tokens = [draw_tokens(count, f"{work.key} {step}", n_vocab) for step in range(work.steps)]
    step_on = streams.decode if work.rows == 1 else streams.advance
    step_on(tokens[0], work.context)  # threads awake, buffers there
    streams.rewind(work.context)
    times = []
    for step in range(work.steps):
        start = perf_counter()
        step_on(tokens[step], work.context + step * work.rows)
        times.append(perf_counter() - start)
    streams.rewind(work.context)
    return times


def median_step_s(streams: Streams, work: Work, n_vocab: int) -> float:
    return median(step_times(streams, work, n_vocab))


def _prompt_s(streams: Streams, work: Work, n_vocab: int) -> float:
    tokens = draw_tokens(work.context, work.key, n_vocab)
    start = perf_counter()
    streams.prompt(tokens)
    return perf_counter() - start
