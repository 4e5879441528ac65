"""A rolling window: the first tokens of a sequence and its most recent ones stay, those in between are dropped.

    text      0 ……… keep ………………………………………………… position
    memory    [ keep ][ dropped: no memory ][ recent … recent + step ]

Tokens are dropped `step` at a time. How many are gone when a token is computed depends on its position alone, so
results do not depend on how a prompt is chunked, on other requests, or on preemption.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_RECENT = 16
"""Fewest recent tokens of a window."""

STEP_TOKENS = 256
"""Most tokens dropped at a time, unless a block is larger."""


@dataclass(frozen=True, slots=True)
class Window:
    """Numbers of tokens, all multiples of the memory's unit. Made by `fit`."""

    keep: int
    recent: int
    step: int

    @classmethod
    def fit(cls, keep: int, recent: int, unit: int) -> Window:
        """At least `keep` and `recent` tokens, rounded up to whole units. A window drops a quarter of its recent tokens
        at a time, or `STEP_TOKENS` if that is less."""
        return cls(_whole(keep, unit), _whole(recent, unit), _whole(min(max(recent // 4, 1), STEP_TOKENS), unit))

    @property
    def capacity(self) -> int:
        """Most tokens in memory. Until the first is dropped, memory is the same as without a window."""
        return self.keep + self.recent + self.step

    def dropped_at(self, position: int) -> int:
        """Tokens that are gone when the one at `position` is computed."""
        return max(0, (position - self.keep - self.recent) // self.step) * self.step

    def until_drop(self, position: int) -> int:
        """Tokens that can be computed from `position` on before some must be dropped."""
        return self.dropped_at(position) + self.capacity - position


def _whole(tokens: int, unit: int) -> int:
    return -(-tokens // unit) * unit
