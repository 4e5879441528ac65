"""How many slots to have: the possible numbers, when to add some, and when fewer are enough.

A change is expensive: the backend clears all of its new memory, and running sequences are saved and loaded. So the
number grows to the demand in powers of two, and shrinks only after a quiet time in which a quarter was enough.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

FEW = 4
"""It is quiet while at most one in this many slots runs."""

GROW_AGAIN_AFTER_S = 30.0
"""Pause after growing has failed."""


def possible_sizes(most: int, movable: int) -> tuple[int, ...]:
    """Powers of two, and `most`. `movable` whole sequences fit as bytes beside `most` slots; with more slots than that,
    growing might become impossible."""
    powers = [1 << power for power in range(most.bit_length())]
    return (*(size for size in powers if size <= movable and size < most), most)


class SlotSizes:
    def __init__(self, sizes: tuple[int, ...], release_after_s: float | None) -> None:
        self._sizes = sizes
        self._release_after_s = release_after_s
        self._grow_from = float("-inf")
        self._few_since: float | None = None
        self._peak = 0
        """Most that ran at once since `_few_since`."""
        self._idle_since: float | None = None
        self._idle_done = False
        """Nothing has run since the memory was given back."""

    @property
    def most(self) -> int:
        return self._sizes[-1]

    def at_least(self, slots: int) -> int:
        return self._sizes[min(bisect_left(self._sizes, slots), len(self._sizes) - 1)]

    def at_most(self, slots: int) -> int:
        return self._sizes[max(bisect_right(self._sizes, slots) - 1, 0)]

    # -- more --------------------------------------------------------------------------------------------------

    def larger(self, slots: int, demand: int, now: float) -> int | None:
        """How many slots to grow to when all of `slots` run and `demand` sequences run or wait; None: do not grow now.

        The caller reports success with `grown`.
        """
        if slots >= self.most or now < self._grow_from:
            return None
        self._grow_from = now + GROW_AGAIN_AFTER_S
        return self.at_least(max(slots + 1, demand))

    def grown(self) -> None:
        self._grow_from = float("-inf")

    # -- fewer -------------------------------------------------------------------------------------------------

    def note(self, slots: int, running: int, now: float) -> None:
        """From now on `running` of `slots` run."""
        woken = self._idle_done and running > 0
        if running > slots // FEW:
            self._few_since = None
        elif self._few_since is None or woken:
            self._few_since, self._peak = now, running
        self._peak = max(self._peak, running)
        if running:
            self._idle_since, self._idle_done = None, False
        elif self._idle_since is None:
            self._idle_since = now

    def idle_at(self) -> float | None:
        """When to give memory back because nothing runs."""
        if self._idle_since is None or self._idle_done or self._release_after_s is None:
            return None
        return self._idle_since + self._release_after_s

    def idle_done(self) -> None:
        self._idle_done = True

    def few_at(self, slots: int) -> float | None:
        """When to shrink to `smaller`, because few run."""
        if self._few_since is None or self._idle_since is not None or self._release_after_s is None:
            return None
        return self._few_since + self._release_after_s if self.smaller() < slots else None

    def smaller(self) -> int:
        """Twice as many as ran lately, so that one more does not make it grow again."""
        return self.at_least(2 * self._peak)

    def few_done(self) -> None:
        self._few_since = None
