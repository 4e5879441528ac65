"""Results that are read off a prompt while it is computed: log probabilities of its tokens, or an embedding.

Such a sequence computes the part of the prompt it needs even if that is cached; what it computes is shared all the
same. Chunks come in order. After a preemption they start again where the memory does, and what follows is read again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

import numpy as np
from numpy.typing import NDArray

from cllm.backends.base import Hidden, Pooling, PoolingKind, PromptScores, Scoring
from cllm.backends.scoring import join_scores
from cllm.errors import BackendError

Embedding = NDArray[np.float32]


class Reading(ABC):
    """The result of one prompt in the making."""

    __slots__ = ()

    weight: float = 1.0
    """What a token costs, relative to one that is only computed."""

    in_order: bool = False
    """Whether a chunk needs the result of the one before it."""

    @property
    @abstractmethod
    def reusable(self) -> int | None:
        """How many of the first tokens may come from the cache; None: all."""

    @abstractmethod
    def ask(self, tokens: array[int], start: int, end: int) -> Scoring | Pooling | None:
        """What the backend should return for the tokens [start, end) of the prompt."""

    @abstractmethod
    def take(self, start: int, read: PromptScores | Hidden) -> None:
        """Take the result of the chunk that began at token `start`. Raises `BackendError` if it is not usable."""

    @abstractmethod
    def result(self) -> PromptScores | Embedding:
        """After the last chunk."""


class PromptScoring(Reading):
    """The log probability of every token of a prompt but the first."""

    __slots__ = ("_parts", "_scored", "top", "weight")

    def __init__(self, top: int, weight: float = 1.0) -> None:
        self.top = top
        self.weight = weight
        self._parts: list[PromptScores] = []
        self._scored = 0

    @property
    def reusable(self) -> int:
        return self._scored

    def ask(self, tokens: array[int], start: int, end: int) -> Scoring | None:
        targets = tokens[start + 1 : end + 1]
        return Scoring(targets, self.top) if targets else None

    def take(self, start: int, read: PromptScores | Hidden) -> None:
        assert isinstance(read, PromptScores) and start <= self._scored
        if np.isnan(read.logprobs).any():
            raise BackendError("the model gave no usable probabilities for a token of the prompt")
        self._keep(start)
        self._parts.append(read)
        self._scored += len(read.logprobs)

    def _keep(self, count: int) -> None:
        """Drop what was read after `count` tokens: it is read again."""
        while self._scored > count:
            last = self._parts.pop()
            self._scored -= len(last.logprobs)
            if self._scored < count:
                logprobs, ranks, ids, tops = last
                kept = slice(count - self._scored)
                self._parts.append(PromptScores(logprobs[kept], ranks[kept], ids[kept], tops[kept]))
                self._scored = count

    def result(self) -> PromptScores:
        if not self._parts:
            nothing = np.zeros((0, self.top))
            return PromptScores(np.zeros(0), np.zeros(0, np.int32), nothing.astype(np.int32), nothing)
        return join_scores(self._parts)


class PromptPooling(Reading):
    """The hidden states of a text as one vector of length 1, or as a single number where the model `ranks`."""

    __slots__ = ("_hidden", "_kind", "_ranks", "in_order")

    def __init__(self, kind: PoolingKind, *, ranks: bool = False) -> None:
        self._kind = kind
        self._ranks = ranks
        self._hidden: Hidden | None = None
        self.in_order = kind != "last"

    @property
    def reusable(self) -> int | None:
        """All, if only the last token's state counts; else none, since cached tokens have no states."""
        return None if self._kind == "last" else 0

    def ask(self, tokens: array[int], start: int, end: int) -> Pooling | None:
        if self._kind == "last":
            return Pooling("last") if end == len(tokens) else None
        return Pooling(self._kind, self._hidden if start else None)

    def take(self, start: int, read: PromptScores | Hidden) -> None:
        assert not isinstance(read, PromptScores)
        if not np.isfinite(read).all():
            raise BackendError("the model gave no usable hidden state for the text")
        self._hidden = read

    def result(self) -> Embedding:
        """Sum or mean, only the direction counts."""
        assert self._hidden is not None
        if self._ranks:
            return self._hidden.astype(np.float32)
        return normalised(self._hidden)


def normalised(vector: Hidden) -> Embedding:
    """With length 1, unless all of it is 0."""
    length = float(np.sqrt((vector.astype(np.float64) ** 2).sum()))
    scaled: Embedding = (vector / length if length > 0.0 else vector).astype(np.float32)
    return scaled
