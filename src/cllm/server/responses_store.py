"""The responses that later requests may go on from: bounded by number, bytes and age, and each key has its own."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cllm.config.responses import ResponsesConfig
    from cllm.engine.tenant import Tenant


class Stored(NamedTuple):
    """Both as JSON, so that what a response takes is known to the byte."""

    conversation: bytes
    """The messages of all turns up to this one and its answer, without instructions."""
    response: bytes

    @property
    def size(self) -> int:
        return len(self.conversation) + len(self.response)


class _Shelf:
    """What one key has: the least recently used first, each with when it was last used."""

    __slots__ = ("entries", "size")

    def __init__(self) -> None:
        self.entries: OrderedDict[str, tuple[Stored, float]] = OrderedDict()
        self.size = 0

    def take(self, response_id: str) -> Stored | None:
        found = self.entries.pop(response_id, None)
        if found is None:
            return None
        self.size -= found[0].size
        return found[0]

    def put(self, response_id: str, stored: Stored, now: float) -> None:
        self.entries[response_id] = stored, now
        self.size += stored.size


class ResponseStore:
    """If there is no room, whoever has most gives up what it has not used for longest: nobody can push out others by
    asking more often than they do."""

    def __init__(self, config: ResponsesConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._shelves: dict[Tenant, _Shelf] = {}

    @property
    def count(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    @property
    def size(self) -> int:
        return sum(shelf.size for shelf in self._shelves.values())

    @property
    def keeps(self) -> bool:
        return self._config.max_stored > 0

    def put(self, tenant: Tenant, response_id: str, stored: Stored) -> bool:
        """False: it is larger than all there may be."""
        self._forget_old()
        if not self.keeps or stored.size > self._config.max_stored_bytes:
            return False
        self._shelves.setdefault(tenant, _Shelf()).put(response_id, stored, self._clock())
        while self.size > self._config.max_stored_bytes:
            self._forget_oldest(max(self._shelves, key=lambda each: self._shelves[each].size))
        while self.count > self._config.max_stored:
            self._forget_oldest(max(self._shelves, key=lambda each: len(self._shelves[each].entries)))
        return response_id in self._shelves.get(tenant, _Shelf()).entries

    def get(self, tenant: Tenant, response_id: str) -> Stored | None:
        """Using it keeps it for another while."""
        self._forget_old()
        stored = self.remove(tenant, response_id)
        if stored is not None:
            self._shelves.setdefault(tenant, _Shelf()).put(response_id, stored, self._clock())
        return stored

    def remove(self, tenant: Tenant, response_id: str) -> Stored | None:
        shelf = self._shelves.get(tenant)
        stored = None if shelf is None else shelf.take(response_id)
        self._drop_if_empty(tenant)
        return stored

    def _forget_old(self) -> None:
        before = self._clock() - self._config.stored_s
        for tenant, shelf in list(self._shelves.items()):
            while shelf.entries and next(iter(shelf.entries.values()))[1] <= before:
                shelf.take(next(iter(shelf.entries)))
            self._drop_if_empty(tenant)

    def _forget_oldest(self, tenant: Tenant) -> None:
        shelf = self._shelves[tenant]
        shelf.take(next(iter(shelf.entries)))
        self._drop_if_empty(tenant)

    def _drop_if_empty(self, tenant: Tenant) -> None:
        if tenant in self._shelves and not self._shelves[tenant].entries:
            del self._shelves[tenant]
