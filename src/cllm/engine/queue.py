"""The queue of sequences that wait for admission: by priority with ageing, in O(log n)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from cllm.engine.request import Sequence

Order = tuple[float, int]


class WaitingQueue:
    """Lower priority numbers go first, and every `ageing_s` seconds of waiting are worth one step of priority.

    All sequences age at the same pace, so their order never changes and the key is fixed at arrival: arrival time +
    priority x ageing. A preempted sequence keeps its key, and so comes back in front.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        # A sequence that left stays in the heap until it comes up, and is not in the dictionary.
        self._heap: list[Order] = []
        self._waiting: dict[Order, Sequence] = {}
        self._ticket = count()

    def rank(self, sequence: Sequence) -> Order:
        """The sequence's place in the order, assigned once."""
        if sequence.order is None:
            request = sequence.request
            sequence.order = (request.arrival + request.submission.priority * self._ageing_s, next(self._ticket))
        return sequence.order

    def push(self, sequence: Sequence) -> None:
        order = self.rank(sequence)
        if order not in self._waiting:
            self._waiting[order] = sequence
            heapq.heappush(self._heap, order)

    def pop(self) -> Sequence | None:
        while self._heap:
            sequence = self._waiting.pop(heapq.heappop(self._heap), None)
            if sequence is not None:
                return sequence
        return None

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is waiting."""
        if sequence.order is not None:
            self._waiting.pop(sequence.order, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())
