"""Bytes per second of reading, writing and copying K/V, as measured in use."""

from __future__ import annotations

HALF_LIFE_BYTES = 256 << 20
"""After this many more bytes, an old measurement counts half."""

FIRST_GUESS = 200e6
"""Bytes per second, before anything was measured."""

GUESS_BYTES = 16 << 20
"""The weight of the first guess."""

NEWEST_WEIGHT = 0.25
"""The weight of the newest measurement in a moving average."""


class Throughput:
    """The average over the last few hundred MB."""

    def __init__(self, guess: float = FIRST_GUESS) -> None:
        self._bytes = float(GUESS_BYTES)
        self._seconds = GUESS_BYTES / guess
        self.total = 0

    def add(self, count: int, seconds: float) -> None:
        keep = 0.5 ** (count / HALF_LIFE_BYTES)
        self._bytes = self._bytes * keep + count
        self._seconds = self._seconds * keep + max(seconds, 1e-9)
        self.total += count

    @property
    def is_known(self) -> bool:
        """Whether enough was measured to outweigh the first guess."""
        return self.total >= GUESS_BYTES

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / self._seconds

    def seconds(self, count: int) -> float:
        return count / self.bytes_per_s


class RecentThroughput:
    """A moving average of single copies, whatever their sizes: it adapts within a few of them."""

    def __init__(self, guess: float) -> None:
        self.bytes_per_s = guess

    def add(self, count: int, seconds: float) -> None:
        if count and seconds > 0:
            self.bytes_per_s += NEWEST_WEIGHT * (count / seconds - self.bytes_per_s)

    def seconds(self, count: int) -> float:
        return count / self.bytes_per_s
