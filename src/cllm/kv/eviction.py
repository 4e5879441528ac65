"""Eviction policies: which unused item goes first. Every operation is O(1).

The owner adds an item when its last user leaves, deeper tree nodes before shallower ones. Using a node uses its
ancestors too, so an ancestor is never older than its descendants, and the next victim is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from time import monotonic
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class EvictionPolicy(Protocol[T]):
    def add(self, item: T, hits: int) -> None:
        """`item` is no longer in use; it has been found in the cache `hits` times."""

    def remove(self, item: T) -> None:
        """`item` is in use again, or gone."""

    def peek(self) -> T:
        """The item to evict next. The policy must not be empty."""

    def oldest_at(self) -> float:
        """When the item to evict next was last used. The policy must not be empty."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[T]:
        """In the order of eviction."""

    def __contains__(self, item: object) -> bool: ...


class LRU(Generic[T]):
    """Least recently used first."""

    def __init__(self) -> None:
        self._items: OrderedDict[T, float] = OrderedDict()

    def add(self, item: T, hits: int) -> None:
        self._items[item] = monotonic()

    def remove(self, item: T) -> None:
        del self._items[item]

    def peek(self) -> T:
        return next(iter(self._items))

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

    def add(self, item: T, hits: int) -> None:
        (self._protected if hits else self._probation).add(item, hits)

    def remove(self, item: T) -> None:
        (self._probation if item in self._probation else self._protected).remove(item)

    def peek(self) -> T:
        return (self._probation if self._probation else self._protected).peek()

    def oldest_at(self) -> float:
        return (self._probation if self._probation else self._protected).oldest_at()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[T]:
        return chain(self._probation, self._protected)

    def __contains__(self, item: object) -> bool:
        return item in self._probation or item in self._protected


POLICIES: dict[str, type[LRU[object]] | type[SegmentedLRU[object]]] = {"lru": LRU, "slru": SegmentedLRU}


def make_policy(name: str) -> EvictionPolicy[T]:
    return POLICIES[name]()  # type: ignore[return-value]
