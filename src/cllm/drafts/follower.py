"""A sequence and the place in some text that it follows: what stands there may be what comes next.

    text     … f o r   i   i n   r a n g e …
    tokens   … f o r   i   i n                    the last tokens stand in the text, too: `place` is behind them,
                            └─ place              and as long as the tokens that come are those of the text, it goes on

The longest match stays the longest one while it goes on. Only when a token comes that is not the one of the text,
another place is looked for.
"""

from __future__ import annotations

from array import array

from cllm.drafts.acceptance import Acceptance, Kind, bucket_of
from cllm.drafts.grams import GRAM, Grams
from cllm.drafts.recent import END, Space
from cllm.engine.request import DraftState

NEAR_TOKENS = 16
"""How far behind the end of a match it may go on, and for how many tokens that is looked for."""
WORTH_RESUMING = 8
"""A match this long is a copy, in which something was changed if it ends."""


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
        self.grams = Grams(len(tokens))
        self.in_vain = 0
        """Looks in a row of which no draft came."""
        self.rest = 0
        """Steps until the next look."""
        self.kind = Kind.OWN
        self.place = 0
        self.length = 0
        """Of the match; 0: there is none."""
        self._text: array[int] | None = None
        """The text that is followed, if it is not the sequence's own: of that there may be a copy with more tokens."""
        self._seen = len(tokens)
        self._lost_place = 0
        self._lost_at = -NEAR_TOKENS

    def follow(self, tokens: array[int]) -> None:
        """Take the tokens in that have come, and have the best match."""
        count = len(tokens)
        if self.length and count > self._seen:
            self._go_on(tokens, count)
        self._seen = count
        if self.length == 0:
            self._look(tokens, count)
        elif self.kind is Kind.NEAR and self.length <= GRAM:
            self._look_closer(tokens)

    def _go_on(self, tokens: array[int], count: int) -> None:
        text = tokens if self._text is None else self._text
        came = count - self._seen
        ahead, there = tokens[self._seen :], text[self.place : self.place + came]
        came_true = came if ahead == there else _common(ahead, there)
        over = self.place + came_true >= len(text) or text[self.place + came_true] == END
        # Where the text itself ends, nothing was foretold that could fail.
        failed = came_true < came and not over
        self.acceptance.saw(self.kind, self.length, came_true, failed)
        self.place += came_true
        self.length += came_true
        if came_true < came or over:
            if self.length >= WORTH_RESUMING and self._text is None:
                self._lost_place, self._lost_at = self.place, count
            self.length = 0

    def _look(self, tokens: array[int], count: int) -> None:
        best = 0.0
        if (own := self.grams.find(tokens, tokens)) is not None:
            best = self._rate(Kind.OWN, own.length)
            self._take(Kind.OWN, own.place, own.length, None)
        if (recent := self.space.find(tokens)) is not None:
            place, length = recent.match
            if recent.text[place] != END and (rate := self._rate(Kind.RECENT, length)) > best:
                best = rate
                self._take(Kind.RECENT, place, length, recent.text)
        if count - self._lost_at < NEAR_TOKENS and self._rate(Kind.NEAR, 1) > best:
            start = self._lost_place
            try:
                place = tokens.index(tokens[-1], start, min(start + NEAR_TOKENS, count - 1)) + 1
            except ValueError:
                return
            self._take(Kind.NEAR, place, 1, None)

    def _look_closer(self, tokens: array[int]) -> None:
        """Where a match may go on is a guess by one token, until a longer one is found elsewhere."""
        own = self.grams.find(tokens, tokens)
        if own is not None and own.length > self.length and own.place != self.place:
            self._take(Kind.OWN, own.place, own.length, None)

    def _rate(self, kind: Kind, length: int) -> float:
        return self.acceptance.rate(kind, bucket_of(length))

    def _take(self, kind: Kind, place: int, length: int, text: array[int] | None) -> None:
        self.kind, self.place, self.length, self._text = kind, place, length, text

    def ahead(self, tokens: array[int], count: int) -> array[int]:
        """The next tokens of what is followed, `count` at most. Where that are the sequence's own last ones, they go
        round: what repeats itself does so again."""
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
    """How many tokens both begin with."""
    count = 0
    for one, other in zip(ones, others, strict=False):
        if one != other:
            break
        count += 1
    return count
