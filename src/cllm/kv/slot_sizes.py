"""How many slots to have: which numbers there may be, when to take more, and when fewer are enough.

Changing the number costs: the backend clears all of its new memory, and what runs is saved and loaded. So it grows to
what is asked for, in powers of two, and shrinks only after a quiet time in which a quarter was enough.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

FEW = 4
"""A quiet time is one in which no more than one in so many slots was running."""

GROW_AGAIN_AFTER_S = 30.0
"""How long growing is not tried again after it could not be done."""


def possible_sizes(most: int, movable: int) -> tuple[int, ...]:
    """Powers of two, and `most`. `movable` whole sequences can wait as bytes beside `most` slots, so with more slots
    than that, growing might not be possible any more."""
    powers = [1 << power for power in range(most.bit_length())]
    return (*(size for size in powers if size <= movable and size < most), most)


class SlotSizes:
    def __init__(self, sizes: tuple[int, ...], release_after_s: float | None) -> None:
        self._sizes = sizes
        self._release_after_s = release_after_s
        self._grow_from = float("-inf")
        self._few_since: float | None = None
        self._peak = 0
        """Most that ran at once since then."""
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
        """With how many to go on when all of `slots` run and `demand` sequences want to; None: with no more now.

        Whoever asks says afterwards whether they were `grown`.
        """
        if slots >= self.most or now < self._grow_from:
            return None
        self._grow_from = now + GROW_AGAIN_AFTER_S
        return self.at_least(max(slots + 1, demand))

    def grown(self) -> None:
        self._grow_from = float("-inf")

    # -- fewer -------------------------------------------------------------------------------------------------

    def note(self, slots: int, running: int, now: float) -> None:
        """From now on so many of `slots` are running."""
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
        """When memory is to be given back because nothing runs."""
        if self._idle_since is None or self._idle_done or self._release_after_s is None:
            return None
        return self._idle_since + self._release_after_s

    def idle_done(self) -> None:
        self._idle_done = True

    def few_at(self, slots: int) -> float | None:
        """When `smaller` is to be gone to, because few run."""
        if self._few_since is None or self._idle_since is not None or self._release_after_s is None:
            return None
        return self._few_since + self._release_after_s if self.smaller() < slots else None

    def smaller(self) -> int:
        """Twice as many as ran lately, so that one more is no reason to grow again."""
        return self.at_least(2 * self._peak)

    def few_done(self) -> None:
        self._few_since = None
