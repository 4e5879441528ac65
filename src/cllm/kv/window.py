"""A rolling window: the first tokens of a sequence and its most recent ones stay, those in between are dropped.

    text      0 ……… keep ………………………………………………… position
    memory    [ keep ][ dropped: no memory ][ recent … recent + step ]

Tokens go `step` at a time. How many are gone when a token is computed depends on its position alone, so it makes no
difference how a prompt is cut, who else runs, or whether the sequence was computed before and lost its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_RECENT = 16
"""Recent tokens that a window has at least."""

STEP_TOKENS = 256
"""Tokens dropped at a time, at most, unless a block has more."""


@dataclass(frozen=True, slots=True)
class Window:
    """Numbers of tokens, all of them whole units of the memory. Make it with `fit`."""

    keep: int
    recent: int
    step: int

    @classmethod
    def fit(cls, keep: int, recent: int, unit: int) -> Window:
        """At least `keep` and `recent` tokens, in memory that is given back in units of so many. A window drops a
        quarter of its recent tokens at a time, or `STEP_TOKENS` if that is less."""
        return cls(_whole(keep, unit), _whole(recent, unit), _whole(min(max(recent // 4, 1), STEP_TOKENS), unit))

    @property
    def capacity(self) -> int:
        """Tokens that are in memory at most. Before the first of them is dropped, they are the same as without a
        window."""
        return self.keep + self.recent + self.step

    def dropped_at(self, position: int) -> int:
        """Tokens that are gone when the one at `position` is computed."""
        return max(0, (position - self.keep - self.recent) // self.step) * self.step

    def until_drop(self, position: int) -> int:
        """Tokens that can be computed from `position` on before some have to go."""
        return self.dropped_at(position) + self.capacity - position


def _whole(tokens: int, unit: int) -> int:
    return -(-tokens // unit) * unit
