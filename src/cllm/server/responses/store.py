"""Stored responses that later requests may continue: limited in number, bytes and age, and separate for each key."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cllm.config.server import ResponsesConfig
    from cllm.engine.tenant import Tenant


class Stored(NamedTuple):
    """As JSON, so that the size of a response is known exactly."""

    conversation: bytes
    """All messages up to and including the answer, without instructions."""
    response: bytes
    asked: int
    """How many of the messages came before the answer."""

    @property
    def size(self) -> int:
        return len(self.conversation) + len(self.response)


class _TenantResponses:
    """One key's responses, least recently used first, with the time of their last use."""

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
    """If there is no room, the key with the most bytes loses its least recently used response: sending more requests
    evicts nothing of others'."""

    def __init__(self, config: ResponsesConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._by_tenant: dict[Tenant, _TenantResponses] = {}

    @property
    def count(self) -> int:
        return sum(len(kept.entries) for kept in self._by_tenant.values())

    @property
    def size(self) -> int:
        return sum(kept.size for kept in self._by_tenant.values())

    @property
    def keeps(self) -> bool:
        return self._config.max_stored > 0

    def put(self, tenant: Tenant, response_id: str, stored: Stored) -> bool:
        """False: it is larger than the store."""
        self._forget_old()
        if not self.keeps or stored.size > self._config.max_stored_bytes:
            return False
        self._by_tenant.setdefault(tenant, _TenantResponses()).put(response_id, stored, self._clock())
        while self.size > self._config.max_stored_bytes:
            self._forget_oldest(max(self._by_tenant, key=lambda each: self._by_tenant[each].size))
        while self.count > self._config.max_stored:
            self._forget_oldest(max(self._by_tenant, key=lambda each: len(self._by_tenant[each].entries)))
        return response_id in self._by_tenant.get(tenant, _TenantResponses()).entries

    def get(self, tenant: Tenant, response_id: str) -> Stored | None:
        """Getting it renews its time."""
        self._forget_old()
        stored = self.remove(tenant, response_id)
        if stored is not None:
            self._by_tenant.setdefault(tenant, _TenantResponses()).put(response_id, stored, self._clock())
        return stored

    def remove(self, tenant: Tenant, response_id: str) -> Stored | None:
        kept = self._by_tenant.get(tenant)
        stored = None if kept is None else kept.take(response_id)
        self._drop_if_empty(tenant)
        return stored

    def _forget_old(self) -> None:
        before = self._clock() - self._config.stored_s
        for tenant, kept in list(self._by_tenant.items()):
            while kept.entries and next(iter(kept.entries.values()))[1] <= before:
                kept.take(next(iter(kept.entries)))
            self._drop_if_empty(tenant)

    def _forget_oldest(self, tenant: Tenant) -> None:
        kept = self._by_tenant[tenant]
        kept.take(next(iter(kept.entries)))
        self._drop_if_empty(tenant)

    def _drop_if_empty(self, tenant: Tenant) -> None:
        if tenant in self._by_tenant and not self._by_tenant[tenant].entries:
            del self._by_tenant[tenant]
