"""Pinned prefixes: protected from eviction for a time, within a limit on their memory.

A pin is one more user of a prefix, so its memory counts as referenced and is never evicted. Pins are limited to a share
of memory, and when a request finds no other room they give way, those that expire first going first. Spaces share the
limit: one with more than its share gives way to one with less.

If the KV memory is lost, the pinned tokens are remembered until they are computed and pinned again.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from cllm.kv.radix import COMMON_SPACE

log = logging.getLogger("cllm.kv")

H = TypeVar("H")
PinSource = Literal["warm", "request"]
"""Where a pin comes from: the operator, or a request."""


@dataclass(slots=True)
class PinMark:
    """A request to pin the first `tokens` of a sequence for `ttl_s` seconds. The manager fills in the outcome before
    the request ends."""

    tokens: int
    ttl_s: float = math.inf
    source: PinSource = "request"
    pin_id: str | None = None
    pinned_tokens: int = 0
    left_s: float = 0.0
    """How long the pin lasts; longer than asked for if an earlier request asked for more."""
    refusal: str | None = None


class WarmResult(NamedTuple):
    """A prefix that was computed before a request needs it."""

    tokens: int
    cached: int
    """Tokens that were already in the cache."""
    seconds: float
    pin_id: str | None
    pinned_tokens: int
    left_s: float | None
    """How long the pin lasts; None: forever, or there is none."""
    refusal: str | None
    """Why it could not be pinned."""


class PinnedPrefix(NamedTuple):
    """The tokens of a pin."""

    tokens: array[int]
    space: bytes

    @property
    def id(self) -> str:
        """Equal for equal tokens of the same space."""
        return blake2b(self.tokens.tobytes(), digest_size=16, key=self.space, person=b"cllm pin").hexdigest()


@dataclass(slots=True)
class Pin(Generic[H]):
    id: str
    of: PinnedPrefix
    holder: H
    bytes: int
    """Size of the whole prefix. What several pins share counts for each here, but once for the limit."""
    source: PinSource
    since: float
    until: float
    uses: int = 1


class LostPin(NamedTuple):
    """A pin whose memory was lost and whose prefix must be computed again."""

    id: str
    of: PinnedPrefix
    source: PinSource
    ttl_s: float


class Pins(Generic[H]):
    """Keeps the list of pins; `drop` frees a pin's memory."""

    def __init__(
        self,
        limit_bytes: int,
        clock: Callable[[], float],
        drop: Callable[[H], None],
        held: Callable[[Sequence[H]], int],
    ) -> None:
        """`held` counts the bytes that several holders have together."""
        self.limit_bytes = limit_bytes
        self.by_id: dict[str, Pin[H]] = {}
        self._lost: dict[str, Pin[None]] = {}
        self.refused = self.expired = self.gave_way = 0
        self.next_at: float | None = None
        """When the next pin expires."""
        self._clock = clock
        self._drop = drop
        self._held = held

    def __len__(self) -> int:
        return len(self.by_id)

    # -- adding ------------------------------------------------------------------------------------------------

    def renew(self, pin_id: str, mark: PinMark) -> bool:
        """Whether that prefix is pinned already; if so, extend it to `mark`'s time if that is longer."""
        pin = self.by_id.get(pin_id)
        if pin is None:
            return False
        now = self._clock()
        mark.pin_id, mark.pinned_tokens, mark.left_s = pin_id, len(pin.of.tokens), max(pin.until - now, mark.ttl_s)
        pin.until = max(pin.until, now + mark.ttl_s)
        pin.uses += 1
        self._look_ahead()
        return True

    def add(self, of: PinnedPrefix, holder: H, mark: PinMark, size: int) -> None:
        now, pin_id = self._clock(), of.id
        before = self._lost.pop(pin_id, None)
        since, uses = (now, 1) if before is None else (before.since, before.uses)
        self.by_id[pin_id] = Pin(pin_id, of, holder, size, mark.source, since, now + mark.ttl_s, uses)
        mark.pin_id, mark.pinned_tokens, mark.left_s = pin_id, len(of.tokens), mark.ttl_s
        self._look_ahead()

    def fits(self, mark: PinMark, space: bytes, pinned: Callable[[], int], more: Callable[[], int]) -> bool:
        """Whether `more` bytes may be pinned for a space; if not, the mark says why."""
        while pinned() + more() > self.limit_bytes:
            if not self._reclaim_from_largest(space, more()):
                return self.refuse(mark, self._no_room(mark, pinned(), more()))
        return True

    def _no_room(self, mark: PinMark, pinned: int, more: int) -> str:
        """Only the operator learns how much all tenants have pinned."""
        if mark.source == "request":
            return f"it needs {more} more bytes than kv.pin_limit leaves room for"
        return f"it needs {more} more bytes, and {pinned} of the {self.limit_bytes} that kv.pin_limit allows are pinned"

    def _reclaim_from_largest(self, space: bytes, size: int) -> bool:
        """Drop a pin of the space that has most, if that is more than its share and `space` stays within its own. The
        operator's pins count for nobody's share. False: nobody has too much."""
        marked: dict[bytes, list[Pin[H]]] = {space: []}
        for pin in self.by_id.values():
            if pin.source == "request":
                marked.setdefault(pin.of.space, []).append(pin)
        held = {owner: self._held([pin.holder for pin in pins]) for owner, pins in marked.items()}
        part = self.limit_bytes // len(held)
        most = max(held, key=held.__getitem__)
        if most == space or held[most] <= part or held[space] + size > part:
            return False
        self.gave_way += 1
        return self.remove(min(marked[most], key=lambda pin: (pin.until, pin.since)).id)

    def refuse(self, mark: PinMark, why: str) -> bool:
        mark.refusal = why
        self.refused += 1
        return False

    # -- removing ----------------------------------------------------------------------------------------------

    def remove(self, pin_id: str, space: bytes | None = None) -> bool:
        """False: there is no such pin (in that space)."""
        pin = self.by_id.get(pin_id)
        known = pin or self._lost.get(pin_id)
        if known is None or (space is not None and known.of.space != space):
            return False
        self._lost.pop(pin_id, None)
        if pin is None:
            return True
        del self.by_id[pin_id]
        self._look_ahead()
        self._drop(pin.holder)
        return True

    def expire(self) -> None:
        """Drop pins whose time is up."""
        now = self._clock()
        if self.next_at is None or now < self.next_at:
            return
        for pin in [pin for pin in self.by_id.values() if pin.until <= now]:
            self.expired += 1
            self.remove(pin.id)

    def give_way(self) -> bool:
        """Drop the pin that expires first, for a request that finds no room. False: there is none."""
        pin = min(self.by_id.values(), key=lambda pin: (pin.until, pin.since), default=None)
        if pin is None:
            return False
        self.gave_way += 1
        log.warning("unpinned a prefix of %d tokens: a request needs its memory", len(pin.of.tokens))
        return self.remove(pin.id)

    def forget(self) -> None:
        """The memory is lost: all pins move to the list of `lost` ones."""
        if self.by_id:
            log.warning("%d pinned prefixes were lost with the KV memory", len(self.by_id))
        for pin in self.by_id.values():
            self._lost[pin.id] = Pin(pin.id, pin.of, None, 0, pin.source, pin.since, pin.until, pin.uses)
        self.by_id.clear()
        self.next_at = None

    def lost(self) -> list[LostPin]:
        """Pins to compute and pin again, the longest-lasting first."""
        now = self._clock()
        self._lost = {name: pin for name, pin in self._lost.items() if pin.until > now}
        pins = sorted(self._lost.values(), key=lambda pin: (-pin.until, pin.since))
        return [LostPin(pin.id, pin.of, pin.source, pin.until - now) for pin in pins]

    # -- looking -----------------------------------------------------------------------------------------------

    def details(self, pinned_bytes: int, number_of: Callable[[H], int]) -> dict[str, Any]:
        """`number_of`: a prefix's id in the view of the cache."""
        to_time = time.time() - self._clock()  # the reader may see this much later
        return {
            "limit_bytes": self.limit_bytes,
            "pinned_bytes": pinned_bytes,
            "refused": self.refused,
            "expired": self.expired,
            "gave_way": self.gave_way,
            "prefixes": [
                *(_line(pin, "pinned", to_time, number_of(pin.holder)) for pin in self.by_id.values()),
                *(_line(pin, "computing", to_time, None) for pin in self._lost.values()),
            ],
        }

    def _look_ahead(self) -> None:
        soonest = min((pin.until for pin in self.by_id.values()), default=math.inf)
        self.next_at = None if math.isinf(soonest) else soonest


def _line(pin: Pin[Any], state: str, to_time: float, prefix: int | None) -> dict[str, Any]:
    return {
        "id": pin.id,
        "state": state,
        "prefix": prefix,
        "tokens": len(pin.of.tokens),
        "bytes": pin.bytes,
        "source": pin.source,
        "shared": pin.of.space == COMMON_SPACE,
        "uses": pin.uses,
        "since": round(pin.since + to_time, 1),
        "until": None if math.isinf(pin.until) else round(pin.until + to_time, 1),
    }
