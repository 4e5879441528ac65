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

import numpy as np

from cllm.drafts.acceptance import Acceptance

NGRAM = 3
LONGEST = 32
"""Tokens compared backwards: longer matches are no better."""
TRIES = 16
"""Places compared for one match."""

_FEW = 16
_SMALLEST, _LARGEST = 1 << 10, 1 << 16
_FACTOR = 1_000_003


class Match(NamedTuple):
    """The `length` tokens before `place` are the last ones of what was looked up."""

    place: int
    length: int


class NgramIndex:
    """An index of all 3-grams of a text, which the caller keeps and passes in: hash chains, as in compressors.

        text      a b c d e a b c ?          the last three tokens are "a b c"
        heads     hash(a b c) ──► 3          the place after they were last seen, so "d e …" may follow
        earlier   3 ──► none                 where they, or others with that hash, were seen before that

    A text only ever grows. A token costs one entry in `earlier` and about two in `heads`; adding one moves nothing, and
    `heads` is rebuilt four times as large when the text has outgrown it."""

    __slots__ = ("_earlier", "_heads", "_mask", "_next")

    def __init__(self, expected_tokens: int = 0) -> None:
        size = _SMALLEST
        while size < min(2 * expected_tokens, _LARGEST):
            size *= 2
        self._empty(size)

    def _empty(self, size: int) -> None:
        self._heads = array("i", [-1]) * size
        self._mask = size - 1
        self._earlier = array("i")
        self._next = NGRAM
        """The first place that is not in the index."""

    def missing(self, text: array[int]) -> int:
        """How many places `extend` would add. The last one has nothing after it and does not count."""
        return max(0, len(text) - self._next)

    def extend(self, text: array[int], most: int) -> None:
        """Add up to `most` places of the text."""
        count = min(most, len(text) - self._next)
        if count <= 0:
            return
        if self._next + count > 2 * len(self._heads) and len(self._heads) < _LARGEST:
            count += self._next - NGRAM
            self._empty(4 * len(self._heads))
        if count > _FEW:
            self._extend_by_many(text, self._next + count)
        else:
            self._extend_by_few(text, self._next + count)

    def _extend_by_few(self, text: array[int], end: int) -> None:
        heads, mask, earlier = self._heads, self._mask, self._earlier
        for place in range(self._next, end):
            mixed = (text[place - 3] * _FACTOR + text[place - 2]) * _FACTOR + text[place - 1]
            slot = (mixed ^ mixed >> 17) & mask
            earlier.append(heads[slot])
            heads[slot] = place
        self._next = end

    def _extend_by_many(self, text: array[int], end: int) -> None:
        start = self._next
        tokens = np.frombuffer(text, np.int32)[start - NGRAM : end - 1].astype(np.int64)
        mixed = (tokens[:-2] * _FACTOR + tokens[1:-1]) * _FACTOR + tokens[2:]
        slots = (mixed ^ mixed >> 17) & self._mask
        order = np.argsort(slots, kind="stable")
        slots = slots[order]
        places = (order + start).astype(np.int32)
        same = slots[1:] == slots[:-1]
        heads = np.frombuffer(self._heads, np.int32)
        before = heads[slots]
        before[1:][same] = places[:-1][same]
        last = np.append(~same, True)
        heads[slots[last]] = places[last]
        earlier = np.empty(end - start, np.int32)
        earlier[order] = before
        self._earlier.frombytes(earlier.tobytes())
        self._next = end

    def find(self, text: array[int], tokens: array[int]) -> Match | None:
        """The place in the text after the longest suffix of `tokens`; of several, the last."""
        count = len(tokens)
        if count < NGRAM:
            return None
        third, second, first = tokens[-3:]
        mixed = (third * _FACTOR + second) * _FACTOR + first
        place = self._heads[(mixed ^ mixed >> 17) & self._mask]
        best_place, best_length, tries = 0, 0, TRIES
        while place > 0 and tries:
            if text[place - 1] == first and text[place - 2] == second and text[place - 3] == third:
                length, limit = NGRAM, min(place, count, LONGEST)
                while length < limit and text[place - 1 - length] == tokens[count - 1 - length]:
                    length += 1
                if length > best_length:
                    best_place, best_length = place, length
                    if length == LONGEST:
                        break
            place = self._earlier[place - NGRAM]
            tries -= 1
        return Match(best_place, best_length) if best_length else None


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
