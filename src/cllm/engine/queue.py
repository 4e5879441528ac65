"""Sequences that wait to be admitted: by priority, with ageing, in O(log n)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from cllm.engine.request import Sequence

Order = tuple[float, int]


class WaitingQueue:
    """Lower priority numbers go first, and every `ageing_s` seconds of waiting are worth one step of priority.

    Everybody ages at the same pace, so the order of two sequences never changes and the key is fixed at arrival:
    arrival time + priority x ageing. A preempted sequence comes back with its old key, that is, in front.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._heap: list[tuple[Order, Sequence]] = []
        self._gone: set[int] = set()
        self._ticket = count()

    def rank(self, sequence: Sequence) -> Order:
        """The sequence's place in the order of all, given once."""
        if sequence.order is None:
            request = sequence.request
            sequence.order = (request.arrival + request.priority * self._ageing_s, next(self._ticket))
        return sequence.order

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (self.rank(sequence), sequence))

    def pop(self) -> Sequence | None:
        while self._heap:
            (_, ticket), sequence = heapq.heappop(self._heap)
            if ticket not in self._gone:
                return sequence
            self._gone.remove(ticket)
        return None

    def discard(self, sequence: Sequence) -> None:
        """Take a waiting sequence out; it leaves the heap when it comes up."""
        self._gone.add(self.rank(sequence)[1])

    def __len__(self) -> int:
        return len(self._heap) - len(self._gone)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for (_, ticket), sequence in self._heap if ticket not in self._gone)
