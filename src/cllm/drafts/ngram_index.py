"""An index of all 3-grams of a text: hash chains, as in compressors.

    text      a b c d e a b c ?          the last three tokens are "a b c"
    heads     hash(a b c) ──► 3          the place after they were last seen, so "d e …" may follow
    earlier   3 ──► none                 where they, or others with that hash, were seen before that

A text only ever grows. A token costs one entry in `earlier` and about two in `heads`; adding one moves nothing, and
`heads` is rebuilt four times as large when the text has outgrown it.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

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
    """The index of one text, which the caller keeps and passes in."""

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
