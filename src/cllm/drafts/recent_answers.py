"""Recent answers, per space: what one tenant generated is never looked up for another, since the time that a draft
saves would give it away.

A space has two texts. Answers are added to the younger one; when that is full it becomes the elder, and the elder is
dropped:

    elder    answer | answer | answer | answer          dropped as a whole
    younger  answer | answer |                          added to

The least recently used spaces are dropped when all together exceed the limit.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple

from cllm.drafts.acceptance import Acceptance
from cllm.drafts.ngram_index import Match, NgramIndex

END = -1
"""Separates answers. Not a token, so that no match crosses it."""
CONTEXT = 32
"""Prompt tokens that are kept before an answer, so that its beginning is found by the end of the prompt."""
LEAST = 8
"""Answers shorter than this are not kept."""
SPACE_SHARE = 4
"""A space gets at most one part in this many."""
MOST_SPACES = 256
"""However small they are."""


class Text:
    __slots__ = ("grams", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self.grams = NgramIndex()


class Found(NamedTuple):
    text: array[int]
    match: Match


class Space:
    """The recent answers of one space."""

    __slots__ = ("acceptance", "elder", "younger")

    def __init__(self) -> None:
        self.younger = Text()
        self.elder: Text | None = None
        self.acceptance = Acceptance()
        """How often drafts were accepted here."""

    @property
    def size(self) -> int:
        return len(self.younger.tokens) + (0 if self.elder is None else len(self.elder.tokens))

    def find(self, tokens: array[int]) -> Found | None:
        younger, elder = self.younger, self.elder
        if not younger.tokens:
            return None
        best = younger.grams.find(younger.tokens, tokens)
        text = younger.tokens
        if elder is not None:
            other = elder.grams.find(elder.tokens, tokens)
            if other is not None and (best is None or other.length > best.length):
                best, text = other, elder.tokens
        return None if best is None else Found(text, best)

    def add(self, tokens: array[int], most: int) -> None:
        """Add an answer, and keep at most `most` tokens in all."""
        half = most // 2
        if len(self.younger.tokens) + len(tokens) + 1 > half:
            self.elder, self.younger = self.younger, Text()
        text = self.younger
        text.tokens.extend(tokens[: half - 1])
        text.tokens.append(END)
        text.grams.extend(text.tokens, len(text.tokens))


class RecentAnswers:
    """All spaces, the most recently used last."""

    def __init__(self, most_tokens: int) -> None:
        self.tokens = 0
        self._most = most_tokens
        self._spaces: OrderedDict[bytes, Space] = OrderedDict()

    def __len__(self) -> int:
        return len(self._spaces)

    def space(self, name: bytes) -> Space:
        """A space by name, created if need be."""
        space = self._spaces.get(name)
        if space is None:
            space = self._spaces[name] = Space()
            self._forget()
        self._spaces.move_to_end(name)
        return space

    def add(self, name: bytes, tokens: array[int], n_prompt: int) -> None:
        """An answer has ended."""
        space = self.space(name)
        most = self._most // SPACE_SHARE
        if len(tokens) - n_prompt < LEAST or most < 2 * LEAST:
            return
        self.tokens -= space.size
        space.add(tokens[max(0, n_prompt - CONTEXT) :], most)
        self.tokens += space.size
        self._forget()

    def _forget(self) -> None:
        while len(self._spaces) > 1 and (self.tokens > self._most or len(self._spaces) > MOST_SPACES):
            _, space = self._spaces.popitem(last=False)
            self.tokens -= space.size
