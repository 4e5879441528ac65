"""How fast the disk is, or another place that K/V are kept in, as measured while it is used."""

from __future__ import annotations

HALF_LIFE_BYTES = 256 << 20
"""After so many bytes more, an old measurement counts half."""

FIRST_GUESS = 200e6
"""Bytes per second, before anything was measured."""

GUESS_BYTES = 16 << 20
"""What the first guess weighs."""


class Speed:
    """Bytes per second over the last few hundred MB."""

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
    def bytes_per_s(self) -> float:
        return self._bytes / self._seconds

    def seconds(self, count: int) -> float:
        return count / self.bytes_per_s
