"""The one interface through which the scheduler uses the KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from cllm.kv.sequence import KVSequence
from cllm.kv.usage import KVUsage

EvictionListener = Callable[[int, float], None]
"""Called with the number of evicted units and the seconds it took."""


class PositionMismatchError(Exception):
    """The backend holds another number of positions for a sequence than the manager: its content is not trusted."""


class KVManager(ABC):
    """Owns all KV memory. One thread uses it; only `usage` results travel to others.

    Life of a sequence: `admit` -> (`grow` -> step -> `commit`)... -> `release`, or `fork` for its twins.
    """

    max_tokens: int
    """The longest sequence that can ever be held, all others gone."""

    unit_tokens: int = 1
    """Prefixes are shared in whole multiples of this."""

    on_eviction: EvictionListener | None = None

    @abstractmethod
    def peek(self, key: bytes) -> int:
        """Tokens of `key` (int32 bytes) that `admit` would find now. Changes nothing."""

    @abstractmethod
    def admit(self, sequence: KVSequence) -> int | None:
        """Give `sequence` memory for its tokens and whatever is cached of them; sets and returns `num_computed`.

        At least one token is left to compute. None means there is no room now: nothing changed.
        """

    @abstractmethod
    def arrange(self) -> None:
        """Admissions are done, a step follows: place what runs so that it computes fast."""

    @abstractmethod
    def grow(self, sequence: KVSequence, count: int) -> bool:
        """Make room to compute `count` more tokens; False means there is none: nothing changed."""

    @abstractmethod
    def commit(self, sequence: KVSequence) -> None:
        """A step has computed up to `num_computed`: what is complete may be shared from now on."""

    @abstractmethod
    def verify(self, sequence: KVSequence) -> None:
        """Compare positions with the backend's own; raises `PositionMismatchError`."""

    @abstractmethod
    def rewind(self, sequence: KVSequence) -> None:
        """Forget what an unfinished step may have written past `num_computed`."""

    @abstractmethod
    def fork(self, parent: KVSequence, child: KVSequence) -> bool:
        """Let `child`, which has the same tokens, start from all that `parent` has computed, without computing it."""

    @abstractmethod
    def release(self, sequence: KVSequence, *, keep: bool = True) -> None:
        """Take everything back. `keep` leaves the computed part in the cache, evictable."""

    @abstractmethod
    def maintain(self, *, idle: bool) -> None:
        """Between steps: evict down to the threshold, tidy up. Bounded work unless idle."""

    @abstractmethod
    def reset(self) -> None:
        """The backend's memory is new and empty. No sequence may be admitted at this time."""

    @abstractmethod
    def usage(self) -> KVUsage: ...

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """What `/kv` shows beyond the numbers."""

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError if any invariant is broken."""
