"""Does a compaction pay? What it would give back against what it would cost, with a price that learns.

Only whole free extents go back to the OS, so scattered blocks keep more memory than they fill. The gain of moving them
together is the bytes that could then go back; the cost is the bytes to move, at the speed that was measured.

On 4 KiB pages, or moved together, placement makes little difference to speed; blocks scattered over large pages decode
slower (see docs/benchmarks.md, memory-placement). There is no separate term for that: scattered blocks are those that
keep extents which could go back, so moving them together follows from the gain in memory already.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = float(1 << 30)
FIRST_PRICE, LEAST_PRICE, HIGHEST_PRICE = 1 * GIB, GIB / 4, 64 * GIB
DEARER, CHEAPER = 1.5, 0.8
KEPT = 0.75
"""A compaction kept its promise if at least so much of what it was to free went back."""


@dataclass(slots=True)
class Offer:
    """What a compaction would give and cost."""

    gain_bytes: int
    cost_blocks: int
    cost_s: float


class Trigger:
    """`price`: the bytes that a second of moving must give back."""

    def __init__(self) -> None:
        self.price = FIRST_PRICE
        self._promised = 0
        self._released_without = 0
        self._judge_at: float | None = None

    def pays(self, offer: Offer) -> bool:
        return offer.cost_blocks > 0 and offer.gain_bytes >= self.price * offer.cost_s and offer.gain_bytes > 0

    def promise(self, gain_bytes: int, released_without: int, judge_at: float) -> None:
        """A compaction was begun for that gain. It is judged by what goes back beyond `released_without`: what had been
        released until then, and what was empty and could have been released without any move."""
        self._promised, self._released_without, self._judge_at = gain_bytes, released_without, judge_at

    def judge(self, released_bytes: int, now: float, *, at_once: bool = False) -> None:
        """Compare what came back with what was promised, once it is time."""
        if self._judge_at is None or (now < self._judge_at and not at_once):
            return
        kept = released_bytes - self._released_without >= KEPT * self._promised
        self.price = min(max(self.price * (CHEAPER if kept else DEARER), LEAST_PRICE), HIGHEST_PRICE)
        self._judge_at = None
