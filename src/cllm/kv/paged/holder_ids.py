"""Ids for the holders of blocks (tree nodes and sequences), so that one array of ints says who holds each block."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

REST = 1 << 16
"""Ids are reused only after this many others were returned, so that a slightly old view names the right holder."""


class HolderIds(Generic[T]):
    __slots__ = ("_next", "_resting", "owners")

    def __init__(self) -> None:
        self.owners: dict[int, T] = {}
        self._next = 1
        self._resting: deque[int] = deque()

    def assign(self, owner: T) -> int:
        if len(self._resting) > REST:
            number = self._resting.popleft()
        else:
            number = self._next
            self._next += 1
        self.owners[number] = owner
        return number

    def release(self, number: int) -> None:
        del self.owners[number]
        self._resting.append(number)
