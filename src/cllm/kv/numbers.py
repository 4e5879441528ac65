"""Small numbers for who holds memory, so that an array can say for every block who does."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

REST = 1 << 16
"""So many numbers rest before the first of them is used again: a picture that is a little old names nobody else."""


class Numbers(Generic[T]):
    __slots__ = ("_next", "_resting", "owners")

    def __init__(self) -> None:
        self.owners: dict[int, T] = {}
        self._next = 1
        self._resting: deque[int] = deque()

    def give(self, owner: T) -> int:
        if len(self._resting) > REST:
            number = self._resting.popleft()
        else:
            number = self._next
            self._next += 1
        self.owners[number] = owner
        return number

    def take_back(self, number: int) -> None:
        del self.owners[number]
        self._resting.append(number)
