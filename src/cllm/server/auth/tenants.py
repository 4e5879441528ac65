"""API keys: which are valid, what each may do, and what it has used."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cllm.engine.tenant import ANONYMOUS, COMMON, Tenant
from cllm.errors import ConfigError
from cllm.server.auth.key_file import OPERATOR, KeyFile, digest, new_salt, read_keys

if TYPE_CHECKING:
    from cllm.config import ServerConfig
    from cllm.engine.observer import RequestRecord

log = logging.getLogger("cllm.server")

LOOK_EVERY_S = 1.0
"""How often the key file is checked for changes, at most."""

Stamp = tuple[int, int, int]


class Caller:
    """A valid key. The event loop counts running and refused requests, the engine's thread what they used."""

    __slots__ = ("cached", "generated", "limit", "prompt", "refused", "requests", "running", "tenant")

    def __init__(self, tenant: Tenant, limit: int | None = None) -> None:
        self.tenant = tenant
        self.limit = limit
        self.running = self.refused = 0
        self.requests = self.prompt = self.cached = self.generated = 0

    def enter(self) -> bool:
        """Begin a request. False: the key's limit is reached."""
        if self.limit is not None and self.running >= self.limit:
            self.refused += 1
            return False
        self.running += 1
        return True

    def leave(self) -> None:
        self.running -= 1


class Tenants(Collector):
    """The key of `server.api_key`, which is the operator's, and those of the file `server.api_keys`.

    Where there is a file, every key has a space of the prefix cache to itself, made from what is kept of it: the same
    after a restart, another one if a key is replaced and a new one gets its name. Also an `EngineObserver`.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic, *, servers: int = 1) -> None:
        """`servers`: each of so many allows its part of a key's limit."""
        self._servers = servers
        self._path = config.api_keys
        self._operator_key = None if config.api_key is None else config.api_key.encode()
        self._shared = config.share_prefixes
        self._prefix = config.metrics_prefix
        self._clock = clock
        self._salt = new_salt()
        self._callers: dict[str, Caller] = {}
        self._by_digest: dict[bytes, Caller] = {}
        self._stamp: Stamp | None = None
        self._look_at = clock() + LOOK_EVERY_S
        if self._path is None:
            self._take(KeyFile(salt=self._salt))
            return
        self._stamp = self._stamp_now()
        self._take(read_keys(self._path))
        spaces = "all share cached prefixes" if self._shared else "each with cached prefixes of its own"
        log.info("%d keys from %s, %s", self._named, self._path, spaces)
        if not self._by_digest:
            log.warning("%s has no key, and server.api_key is not set: every request will be refused", self._path)

    # -- requests ----------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> Caller | None:
        """The caller with this key: one digest and one look-up, however many keys there are."""
        if self._path is not None and self._clock() >= self._look_at:
            self._look()
        return self._by_digest.get(digest(key, self._salt))

    def sees_all(self, caller: Caller) -> bool:
        """Whether this key may see the requests of all keys."""
        return self._shared or len(self._by_digest) == 1 or caller is self._callers.get(OPERATOR)

    def warm_tenant(self, shared: bool) -> Tenant | None:
        """The tenant that `kv.warm` is computed for: all keys, or the operator alone. None: there is no operator, and
        each key has its own cache."""
        if self._path is None or self._shared:
            return ANONYMOUS
        if shared:
            return COMMON
        operator = self._callers.get(OPERATOR)
        return None if operator is None else operator.tenant

    # -- the file ----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Reload the file if it has changed. If it cannot be read, the previous keys stay valid."""
        self._look_at = self._clock() + LOOK_EVERY_S
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        assert self._path is not None
        try:
            self._take(read_keys(self._path))
        except ConfigError as error:
            log.error("%s; the previous keys stay valid", error)
        else:
            log.info("reloaded keys from %s: %d keys", self._path, self._named)

    @property
    def _named(self) -> int:
        """Number of keys in the file, without the operator's."""
        return len(self._callers.keys() - {OPERATOR})

    def _stamp_now(self) -> Stamp | None:
        assert self._path is not None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _take(self, file: KeyFile) -> None:
        callers: dict[str, Caller] = {}
        by_digest: dict[bytes, Caller] = {}
        for key in file.keys:
            space = b"" if self._shared else space_of(key.digest)
            caller = self._caller(Tenant(key.name, space), key.max_concurrent)
            callers[key.name] = by_digest[bytes.fromhex(key.digest)] = caller
        if self._operator_key is not None:
            # A single key is like none: one user, one cache.
            alone = self._path is None
            kept = digest(self._operator_key, file.salt)
            tenant = ANONYMOUS if alone else Tenant(OPERATOR, b"" if self._shared else space_of(kept.hex()))
            callers[OPERATOR] = by_digest[kept] = self._caller(tenant, None)
        self._salt, self._callers, self._by_digest = file.salt, callers, by_digest

    def _caller(self, tenant: Tenant, limit: int | None) -> Caller:
        """Keeps the counters of the key that had this name before."""
        caller = self._callers.get(tenant.name or OPERATOR) or Caller(tenant)
        caller.tenant = tenant
        caller.limit = None if limit is None else math.ceil(limit / self._servers)
        return caller

    # -- usage -------------------------------------------------------------------------------------------------

    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None:
        """Steps belong to no key."""

    def on_eviction(self, count: int, seconds: float) -> None:
        """Nor do evictions."""

    def on_finished(self, record: RequestRecord) -> None:
        caller = self._callers.get(record.tenant)
        if caller is not None:
            caller.requests += 1
            caller.prompt += record.prompt_tokens
            caller.cached += record.cached_tokens
            caller.generated += record.generated_tokens

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        """One value per current key, by name."""
        if self._path is None:
            return
        callers = list(self._callers.items())
        running = GaugeMetricFamily(f"{self._prefix}:key_requests_running", "Requests of a key.", labels=["key"])
        counted = {
            "requests": ("Requests of a key that ended.", [caller.requests for _, caller in callers]),
            "requests_refused": ("Requests over a key's limit.", [caller.refused for _, caller in callers]),
            "prompt_tokens": ("Prompt tokens of a key.", [caller.prompt for _, caller in callers]),
            "prompt_tokens_cached": ("Those that came from the KV cache.", [caller.cached for _, caller in callers]),
            "generation_tokens": ("Tokens generated for a key.", [caller.generated for _, caller in callers]),
        }
        for name, caller in callers:
            running.add_metric([name], caller.running)
        yield running
        for metric, (text, values) in counted.items():
            family = CounterMetricFamily(f"{self._prefix}:key_{metric}", text, labels=["key"])
            for (name, _), value in zip(callers, values, strict=True):
                family.add_metric([name], value)
            yield family


def space_of(kept: str) -> bytes:
    """The cache space of a key, derived from what is stored of it. It is not secret: clients cannot send one."""
    return blake2b(kept.encode(), digest_size=16, person=b"cllm prefixes").digest()
