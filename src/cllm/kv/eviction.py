"""Eviction policies: which unused item goes first.

The owner adds an item when its last user leaves, deeper tree nodes before shallower ones. Using a node uses its
ancestors too, so an ancestor is never older than its descendants; where worth counts, too, the owner says what it must
not go before. So the next victim is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, count
from math import inf, log2, nextafter
from time import monotonic
from typing import Generic, NamedTuple, Protocol, TypeVar

T = TypeVar("T")

TWICE_AT = 65_536
"""At about this position computing a token costs twice as much as at the beginning, because it attends to more."""

BONUS = 0.1
"""How much later something goes for each time that its worth doubles, in times of everything being replaced once."""

LOWEST = 2.0**-40
"""The worth of what is worth nothing."""


def computing(begin: int, end: int) -> float:
    """What it costs to compute the tokens from `begin` to `end`; one at the beginning costs 1."""
    return (end - begin) * (1 + (begin + end) / (2 * TWICE_AT))


class EvictionPolicy(Protocol[T]):
    def add(self, item: T, hits: int, worth: float = 1.0, after: float = -inf) -> float:
        """`item` is no longer in use; it has been found in the cache `hits` times. `worth`: the computing that each of
        its bytes saves when it is used again. It goes later than what has the rank `after`. Returns its rank: the
        lowest goes first, also between policies that were made together."""

    def revalue(self, item: T, worth: float, most: float = inf) -> None:
        """Its worth has changed, its age has not. Its rank becomes `most` at most."""

    def remove(self, item: T) -> None:
        """`item` is in use again, or gone."""

    def peek(self) -> T:
        """The item to evict next. The policy must not be empty."""

    def rank(self) -> float:
        """The rank of the item to evict next; infinite if there is none."""

    def oldest_at(self) -> float:
        """When the item to evict next was last used. The policy must not be empty."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[T]:
        """In the order of eviction."""

    def __contains__(self, item: object) -> bool: ...


class LRU(Generic[T]):
    """Least recently used first. Every operation is O(1)."""

    def __init__(self) -> None:
        self._items: OrderedDict[T, float] = OrderedDict()

    def add(self, item: T, hits: int, worth: float = 1.0, after: float = -inf) -> float:
        self._items[item] = rank = monotonic()
        return rank

    def revalue(self, item: T, worth: float, most: float = inf) -> None:
        """Only age counts."""

    def remove(self, item: T) -> None:
        del self._items[item]

    def peek(self) -> T:
        return next(iter(self._items))

    def rank(self) -> float:
        return next(iter(self._items.values()), inf)

    def oldest_at(self) -> float:
        return next(iter(self._items.values()))

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items


class SegmentedLRU(Generic[T]):
    """LRU in two classes: items that were never hit go before items that were.

    A burst of prompts that are never repeated cannot push out a system prompt that everybody shares.
    """

    def __init__(self) -> None:
        self._probation: LRU[T] = LRU()
        self._protected: LRU[T] = LRU()

    def add(self, item: T, hits: int, worth: float = 1.0, after: float = -inf) -> float:
        return (self._protected if hits else self._probation).add(item, hits)

    def revalue(self, item: T, worth: float, most: float = inf) -> None:
        """Only hits and age count."""

    def remove(self, item: T) -> None:
        (self._probation if item in self._probation else self._protected).remove(item)

    def peek(self) -> T:
        return (self._probation if self._probation else self._protected).peek()

    def rank(self) -> float:
        return (self._probation if self._probation else self._protected).rank()

    def oldest_at(self) -> float:
        return (self._probation if self._probation else self._protected).oldest_at()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[T]:
        return chain(self._probation, self._protected)

    def __contains__(self, item: object) -> bool:
        return item in self._probation or item in self._protected


class _Ranked(NamedTuple):
    rank: float
    number: int
    """Among equals, the one that came first goes first."""
    since: float
    """The clock when it was last used."""
    used_at: float


class EvictionClock:
    """Counts how often everything was replaced by something new: `advance` by the share of it that was."""

    def __init__(self) -> None:
        self.now = 0.0
        self.numbers = count()

    def advance(self, share: float) -> None:
        self.now += share


class Worth(Generic[T]):
    """What saves the least computing per byte goes first, with age: an item's rank is the clock when it was last used,
    and a bonus for every time that its worth doubles. So nothing stays for ever, whatever it is worth, and items of
    equal worth go as with LRU. Operations are O(log n)."""

    def __init__(self, clock: EvictionClock | None = None) -> None:
        self._clock = clock or EvictionClock()
        self._items: dict[T, _Ranked] = {}
        self._heap: list[tuple[float, int, T]] = []
        """May have items that are gone or were ranked anew, but never one that is not known at the top."""

    def add(self, item: T, hits: int, worth: float = 1.0, after: float = -inf) -> float:
        since = self._clock.now
        return self._push(item, max(since + _bonus(worth), nextafter(after, inf)), since, monotonic())

    def revalue(self, item: T, worth: float, most: float = inf) -> None:
        old = self._items[item]
        rank = min(old.since + _bonus(worth), most)
        if rank != old.rank:
            self._push(item, rank, old.since, old.used_at)
            self._tidy()

    def _push(self, item: T, rank: float, since: float, used_at: float) -> float:
        number = next(self._clock.numbers)
        self._items[item] = _Ranked(rank, number, since, used_at)
        heappush(self._heap, (rank, number, item))
        return rank

    def remove(self, item: T) -> None:
        del self._items[item]
        self._tidy()

    def _tidy(self) -> None:
        heap, items = self._heap, self._items
        if len(heap) > 2 * len(items) + 64:
            heap[:] = [(ranked.rank, ranked.number, item) for item, ranked in items.items()]
            heapify(heap)
        while heap and not self._is_current(heap[0]):
            heappop(heap)

    def _is_current(self, entry: tuple[float, int, T]) -> bool:
        ranked = self._items.get(entry[2])
        return ranked is not None and ranked.number == entry[1]

    def peek(self) -> T:
        return self._heap[0][2]

    def rank(self) -> float:
        return self._heap[0][0] if self._heap else inf

    def oldest_at(self) -> float:
        return self._items[self.peek()].used_at

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        """Lazily, from a heap of places in the heap: the first few cost little, however many there are."""
        heap = self._heap
        front = [(heap[0][:2], 0)] if heap else []
        while front:
            _, place = heappop(front)
            if self._is_current(heap[place]):
                yield heap[place][2]
            for below in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heappush(front, (heap[below][:2], below))

    def __contains__(self, item: object) -> bool:
        return item in self._items


def _bonus(worth: float) -> float:
    return BONUS * log2(max(worth, LOWEST))


POLICIES = ("worth", "lru", "slru")


def make_policy(name: str, clock: EvictionClock | None = None) -> EvictionPolicy[T]:
    """Policies that rank their items against each other have one clock."""
    return LRU() if name == "lru" else SegmentedLRU() if name == "slru" else Worth(clock)
