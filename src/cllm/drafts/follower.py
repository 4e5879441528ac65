"""Follows a sequence along a text with the same tokens: what comes next there may come next here.

    text     … f o r   i   i n   r a n g e …
    tokens   … f o r   i   i n                    the last tokens are in the text, too: `place` is after them,
                            └─ place              and moves on as long as new tokens are those of the text

The longest match stays the longest while it continues. Only when a new token differs is another one looked up.
"""

from __future__ import annotations

from array import array

from cllm.drafts.acceptance import Acceptance, MatchKind, bucket_of
from cllm.drafts.recent_answers import END, NGRAM, NgramIndex, Space
from cllm.engine.request import DraftState

NEAR_TOKENS = 16
"""How far after the end of a match it may resume, and for how many tokens that is tried."""
WORTH_RESUMING = 8
"""A match this long is a copy; if it ends, something was changed in it."""


class Follower(DraftState):
    __slots__ = (
        "_lost_at",
        "_lost_place",
        "_seen",
        "_text",
        "acceptance",
        "grams",
        "in_vain",
        "kind",
        "length",
        "place",
        "rest",
        "space",
    )

    def __init__(self, tokens: array[int], space: Space) -> None:
        self.space = space
        self.acceptance = Acceptance(space.acceptance)
        self.grams = NgramIndex(len(tokens))
        self.in_vain = 0
        """Lookups in a row without a draft."""
        self.rest = 0
        """Steps until the next lookup."""
        self.kind = MatchKind.OWN
        self.place = 0
        self.length = 0
        """The length of the match; 0: there is none."""
        self._text: array[int] | None = None
        """The text that is followed; None: the sequence's own tokens, which may be replaced by a longer copy."""
        self._seen = len(tokens)
        self._lost_place = 0
        self._lost_at = -NEAR_TOKENS

    def follow(self, tokens: array[int]) -> None:
        """Take in new tokens, and find the best match."""
        count = len(tokens)
        if self.length and count > self._seen:
            self._advance(tokens, count)
        self._seen = count
        if self.length == 0:
            self._find(tokens, count)
        elif self.kind is MatchKind.NEAR and self.length <= NGRAM:
            self._find_longer(tokens)

    def _advance(self, tokens: array[int], count: int) -> None:
        text = tokens if self._text is None else self._text
        new = count - self._seen
        found, expected = tokens[self._seen :], text[self.place : self.place + new]
        accepted = new if found == expected else _common(found, expected)
        over = self.place + accepted >= len(text) or text[self.place + accepted] == END
        # Where the text ends, there was no prediction that could fail.
        failed = accepted < new and not over
        self.acceptance.observe(self.kind, self.length, accepted, failed)
        self.place += accepted
        self.length += accepted
        if accepted < new or over:
            if self.length >= WORTH_RESUMING and self._text is None:
                self._lost_place, self._lost_at = self.place, count
            self.length = 0

    def _find(self, tokens: array[int], count: int) -> None:
        best = 0.0
        if (own := self.grams.find(tokens, tokens)) is not None:
            best = self._rate(MatchKind.OWN, own.length)
            self._take(MatchKind.OWN, own.place, own.length, None)
        if (recent := self.space.find(tokens)) is not None:
            place, length = recent.match
            if recent.text[place] != END and (rate := self._rate(MatchKind.RECENT, length)) > best:
                best = rate
                self._take(MatchKind.RECENT, place, length, recent.text)
        if count - self._lost_at < NEAR_TOKENS and self._rate(MatchKind.NEAR, 1) > best:
            start = self._lost_place
            try:
                place = tokens.index(tokens[-1], start, min(start + NEAR_TOKENS, count - 1)) + 1
            except ValueError:
                return
            self._take(MatchKind.NEAR, place, 1, None)

    def _find_longer(self, tokens: array[int]) -> None:
        """A resumed match is a guess from one token, until a longer one is found elsewhere."""
        own = self.grams.find(tokens, tokens)
        if own is not None and own.length > self.length and own.place != self.place:
            self._take(MatchKind.OWN, own.place, own.length, None)

    def _rate(self, kind: MatchKind, length: int) -> float:
        return self.acceptance.rate(kind, bucket_of(length))

    def _take(self, kind: MatchKind, place: int, length: int, text: array[int] | None) -> None:
        self.kind, self.place, self.length, self._text = kind, place, length, text

    def ahead(self, tokens: array[int], count: int) -> array[int]:
        """The next tokens of the match, up to `count`. If they run into the end of the sequence itself, they repeat."""
        if self._text is None:
            found = tokens[self.place : self.place + count]
            while 0 < len(found) < count:
                found += found[: count - len(found)]
            return found
        found = self._text[self.place : self.place + count]
        try:
            return found[: found.index(END)]
        except ValueError:
            return found


def _common(ones: array[int], others: array[int]) -> int:
    """The length of the common prefix."""
    count = 0
    for one, other in zip(ones, others, strict=False):
        if one != other:
            break
        count += 1
    return count
