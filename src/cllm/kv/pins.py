"""Prefixes that stay although nobody uses them: which, until when, and how much memory they may take together.

A pin is one more user of a prefix, so its memory counts as referenced and the eviction order never sees it. There is
less of it than of memory (the limit), and where nothing else is left for a request, pins give way: the ones that end
soonest first.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from cllm.kv.radix import TOKEN_BYTES
from cllm.kv.sequence import KVSequence

log = logging.getLogger("cllm.kv")

H = TypeVar("H")


@dataclass(slots=True)
class PinMark:
    """A wish that the first `tokens` of a sequence stay for `ttl_s` seconds. Whoever pins says here what came of it,
    before the end of the request is told to anybody."""

    tokens: int
    ttl_s: float = math.inf
    source: str = "request"
    pin_id: str | None = None
    pinned_tokens: int = 0
    refusal: str | None = None


@dataclass(slots=True)
class Pin(Generic[H]):
    id: str
    holder: H
    tokens: int
    bytes: int
    """Of the whole prefix; what several pins have in common counts for each here, and once for the limit."""
    source: str
    since: float
    until: float
    uses: int = 1


class Pins(Generic[H]):
    """The book of them. Memory is for `drop` to let go of."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float], drop: Callable[[H], None]) -> None:
        self.limit_bytes = limit_bytes
        self.by_id: dict[str, Pin[H]] = {}
        self.refused = self.expired = self.gave_way = 0
        self.next_at: float | None = None
        """When the next one's time is up."""
        self._clock = clock
        self._drop = drop

    def __len__(self) -> int:
        return len(self.by_id)

    # -- coming ------------------------------------------------------------------------------------------------

    def renew(self, pin_id: str, mark: PinMark) -> bool:
        """Whether that prefix is pinned already; then it is for `mark`'s time from now on, if that is longer."""
        pin = self.by_id.get(pin_id)
        if pin is None:
            return False
        pin.until = max(pin.until, self._clock() + mark.ttl_s)
        pin.uses += 1
        mark.pin_id, mark.pinned_tokens = pin_id, pin.tokens
        self._look_ahead()
        return True

    def add(self, pin_id: str, holder: H, mark: PinMark, tokens: int, size: int) -> None:
        now = self._clock()
        self.by_id[pin_id] = Pin(pin_id, holder, tokens, size, mark.source, now, now + mark.ttl_s)
        mark.pin_id, mark.pinned_tokens = pin_id, tokens
        self._look_ahead()

    def fits(self, mark: PinMark, pinned_bytes: int, more_bytes: int) -> bool:
        """Whether so much more may be pinned; if not, the mark says why."""
        if pinned_bytes + more_bytes <= self.limit_bytes:
            return True
        return self.refuse(
            mark,
            f"it needs {more_bytes} bytes more, and {pinned_bytes} of the {self.limit_bytes} bytes that may be pinned "
            "are (kv.pin_limit)",
        )

    def refuse(self, mark: PinMark, why: str) -> bool:
        mark.refusal = why
        self.refused += 1
        return False

    # -- going -------------------------------------------------------------------------------------------------

    def remove(self, pin_id: str) -> bool:
        """False: there is no such pin."""
        pin = self.by_id.pop(pin_id, None)
        if pin is None:
            return False
        self._look_ahead()
        self._drop(pin.holder)
        return True

    def expire(self) -> None:
        """Let go of those whose time is up."""
        now = self._clock()
        if self.next_at is None or now < self.next_at:
            return
        for pin in [pin for pin in self.by_id.values() if pin.until <= now]:
            self.expired += 1
            self.remove(pin.id)

    def give_way(self) -> bool:
        """Let go of the one that ends soonest, for a request that finds no room. False: there is none."""
        pin = min(self.by_id.values(), key=lambda pin: (pin.until, pin.since), default=None)
        if pin is None:
            return False
        self.gave_way += 1
        log.warning("a pinned prefix of %d tokens gives way to a request that needs its memory", pin.tokens)
        return self.remove(pin.id)

    def forget(self) -> None:
        """The memory is lost, and with it what was pinned."""
        if self.by_id:
            log.warning("%d pinned prefixes are lost with the memory that held them", len(self.by_id))
        self.by_id.clear()
        self.next_at = None

    # -- looking -----------------------------------------------------------------------------------------------

    def details(self, pinned_bytes: int, number_of: Callable[[H], int]) -> dict[str, Any]:
        """`number_of`: what the picture of the cache knows a prefix by."""
        to_time = time.time() - self._clock()  # whoever reads this may do so much later
        return {
            "limit_bytes": self.limit_bytes,
            "pinned_bytes": pinned_bytes,
            "refused": self.refused,
            "expired": self.expired,
            "gave_way": self.gave_way,
            "prefixes": [
                {
                    "id": pin.id,
                    "prefix": number_of(pin.holder),
                    "tokens": pin.tokens,
                    "bytes": pin.bytes,
                    "source": pin.source,
                    "uses": pin.uses,
                    "since": round(pin.since + to_time, 1),
                    "until": None if math.isinf(pin.until) else round(pin.until + to_time, 1),
                }
                for pin in self.by_id.values()
            ],
        }

    def _look_ahead(self) -> None:
        soonest = min((pin.until for pin in self.by_id.values()), default=math.inf)
        self.next_at = None if math.isinf(soonest) else soonest


def pin_id(sequence: KVSequence, tokens: int) -> str:
    """The name of a pin: the same for the same tokens of the same space."""
    data = memoryview(sequence.tokens)[:tokens].tobytes()
    assert len(data) == tokens * TOKEN_BYTES
    return blake2b(data, digest_size=16, key=sequence.space, person=b"cllm pin").hexdigest()
