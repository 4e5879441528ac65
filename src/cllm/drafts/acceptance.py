"""Acceptance rates: how likely the model chooses the next token of a match.

That depends on where the match was found and on its length, and is measured without drafting: every token that the
model chooses while there is a match either continues it or not. So a sequence whose drafts do not pay costs only the
lookups, and is drafted for again as soon as its matches come true.

A sequence starts with the rates of its space, and a space with the figures below.
"""

from __future__ import annotations

from enum import IntEnum


class MatchKind(IntEnum):
    """Where a match was found."""

    OWN = 0
    """In the sequence itself."""
    NEAR = 1
    """In the sequence, by its last token alone, shortly after a longer match ended: a copy with changes."""
    RECENT = 2
    """In a recent answer."""


BUCKETS = 7
"""By length of the match: 0, 1, 2-3, 4-7, 8-15, 16-31, 32 and more."""

_EXPECTED = (
    (0.3, 0.3, 0.4, 0.55, 0.7, 0.8, 0.9),
    (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    (0.2, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9),
)
_SPACE_TRUST, _SPACE_MEMORY = 16.0, 1.0 - 1.0 / 400.0
_OWN_TRUST, _OWN_MEMORY = 6.0, 1.0 - 1.0 / 40.0
"""How many outcomes the starting rate counts as, and how much of old outcomes is left after a new one."""


def bucket_of(length: int) -> int:
    return min(length.bit_length(), BUCKETS - 1)


class Acceptance:
    """Outcomes of a sequence (`of` a space) or of a space; recent ones count more."""

    __slots__ = ("_accepted", "_memory", "_of", "_seen", "_trust")

    def __init__(self, of: Acceptance | None = None) -> None:
        self._of = of
        self._trust, self._memory = (_SPACE_TRUST, _SPACE_MEMORY) if of is None else (_OWN_TRUST, _OWN_MEMORY)
        self._accepted = [0.0] * (len(MatchKind) * BUCKETS)
        self._seen = [0.0] * (len(MatchKind) * BUCKETS)

    def rate(self, kind: MatchKind, bucket: int) -> float:
        cell = kind * BUCKETS + bucket
        known = _EXPECTED[kind][bucket] if self._of is None else self._of.rate(kind, bucket)
        return (self._accepted[cell] + self._trust * known) / (self._seen[cell] + self._trust)

    def rates(self, kind: MatchKind, length: int, most: int) -> list[float]:
        """For each of the next `most` tokens of a match, given that all before it are accepted."""
        found: list[float] = []
        while len(found) < most:
            bucket = bucket_of(length + len(found))
            until = most if bucket == BUCKETS - 1 else min(most, (1 << bucket) - length)
            found += [self.rate(kind, bucket)] * (until - len(found))
        return found

    def observe(self, kind: MatchKind, length: int, accepted: int, failed: bool) -> None:
        """A match of this length went on for `accepted` tokens, and then, if it `failed`, did not."""
        if self._of is not None:
            self._of.observe(kind, length, accepted, failed)
        memory = self._memory
        for step in range(accepted + failed):
            cell = kind * BUCKETS + bucket_of(length + step)
            self._seen[cell] = self._seen[cell] * memory + 1.0
            self._accepted[cell] = self._accepted[cell] * memory + (step < accepted)
