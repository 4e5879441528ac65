"""Requests as a trace describes them: when they come, what they share, how long their answers are."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

Span = tuple[int, int]
"""`(first, count)`: the tokens first, first + 1, ... Equal spans are equal text; different text has disjoint spans."""

Text: TypeAlias = "tuple[Span, ...] | array[int]"
"""Tokens by spans, which cost nothing until they are spelled, or one by one."""

TOKEN_IDS = 1 << 31

MESSAGE_END = (TOKEN_IDS - 2, 1)
"""The token that ends a message in every model's chat template: a span that all may have."""


@dataclass(slots=True)
class TracedRequest:
    arrival: float
    """Seconds after the start; of a follower: after the end of what it follows."""
    prompt: Text
    answer: Text
    followers: tuple[TracedRequest, ...] = field(default=())
    """Requests that are sent when this one's answer is there: the next turns of a conversation."""

    @property
    def prompt_length(self) -> int:
        return length(self.prompt)

    @property
    def answer_length(self) -> int:
        return length(self.answer)


class Trace(Protocol):
    """Iterating gives the requests in order of arrival, the same ones every time."""

    @property
    def name(self) -> str: ...

    @property
    def requests(self) -> int:
        """All of them, followers included."""

    def __iter__(self) -> Iterator[TracedRequest]: ...


class TokenSource:
    """Gives out spans that nobody else has, so that only what is meant to be shared is."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> Span:
        # Ids are int32. After 2^31 tokens they begin again, which is of no consequence: what had them is long evicted.
        if self._next + count > MESSAGE_END[0]:
            self._next = 0
        first = self._next
        self._next += count
        return first, count


def length(text: Text) -> int:
    return len(text) if isinstance(text, array) else sum(count for _, count in text)


def spell(text: Text) -> array[int]:
    """The tokens themselves."""
    if isinstance(text, array):
        return text
    tokens: array[int] = array("i")
    for first, count in text:
        tokens.frombytes(np.arange(first, first + count, dtype=np.int32).tobytes())
    return tokens
