"""What an ingress knows of the replicas of one model, for choosing one.

Two threads use it: Ray's, which routes, and that of the event loop, which hears from the replicas.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from cllm.cluster.messages import Route
from cllm.kv.block_names import TOKEN_BYTES, chain, root_name
from cllm.kv.events import KVEvent
from cllm.kv.radix import COMMON_SPACE
from cllm.routing.index import short_hashes
from cllm.routing.policy import POLICIES, PrefixPolicy, ReplicaStats, RoutingPolicy

_ON_THE_WAY_S = 0.02
"""What was sent to a replica this shortly before its report may not be part of it."""

_SAMPLE = 2
"""With several ingresses, each samples this many replicas and takes the least loaded."""


class Address(NamedTuple):
    host: str
    port: int
    secret: bytes


class RoutingView:
    def __init__(self, block_tokens: int, routing: str = PrefixPolicy.name, *, alone: bool = True) -> None:
        """`alone`: no other ingress sends requests to the same replicas."""
        self._replicas: Mapping[str, Address] = {}
        self._on_replicas: Callable[[Mapping[str, Address]], None] = lambda replicas: None
        self._lock = threading.Lock()
        self._block_tokens = block_tokens
        self._policy = _make_policy(routing, block_tokens, alone)
        self._index = self._policy.index
        self._weights: dict[str, str] = {}
        self._contexts: dict[str, int] = {}
        self._telling: set[str] = set()
        """Replicas that tell what they have cached."""

    # -- what Ray says -----------------------------------------------------------------------------------------

    def tell(self, replicas: Mapping[str, Address]) -> None:
        """The replicas that Ray knows, each time they change."""
        self._replicas = replicas
        self._on_replicas(replicas)

    def follow(self, on_replicas: Callable[[Mapping[str, Address]], None]) -> None:
        """Call this now and each time they change, in Ray's thread."""
        self._on_replicas = on_replicas
        on_replicas(self._replicas)

    # -- what replicas say -------------------------------------------------------------------------------------

    def add(self, replica: str, weights: str, *, tells_cache: bool, max_context: int = sys.maxsize) -> None:
        with self._lock:
            self._weights[replica] = weights
            self._contexts[replica] = max_context
            self._policy.add(replica)
            if tells_cache:
                self._telling.add(replica)

    def remove(self, replica: str) -> None:
        with self._lock:
            self._weights.pop(replica, None)
            self._contexts.pop(replica, None)
            self._telling.discard(replica)
            self._policy.remove(replica)

    def apply(self, replica: str, events: Sequence[KVEvent]) -> None:
        if self._index is not None:
            with self._lock:
                self._index.apply(replica, events, time.monotonic())

    def take_content(self, replica: str, number: int, names: Iterable[bytes]) -> None:
        if self._index is not None:
            with self._lock:
                self._index.snapshot(replica, number, names, time.monotonic())

    def report(self, replica: str, stats: ReplicaStats) -> None:
        now = time.monotonic()
        with self._lock:
            self._policy.report(replica, stats, now - _ON_THE_WAY_S)
            if self._index is not None:
                self._index.apply(replica, (), now)

    # -- numbers -----------------------------------------------------------------------------------------------

    @property
    def index_blocks(self) -> int:
        """Blocks known of all replicas."""
        return 0 if self._index is None else self._index.blocks

    def is_silent(self, replica: str) -> bool:
        """Whether it should tell what it has cached, and has not for a while."""
        if self._index is None:
            return False
        with self._lock:
            return replica in self._telling and not self._index.knows(replica, time.monotonic())

    # -- choosing ----------------------------------------------------------------------------------------------

    def choose(self, route: Route, candidates: Iterable[str]) -> str | None:
        """One of the candidates, or None if none of them can take it now. Those already tried come last."""
        started = time.perf_counter()
        with self._lock:
            able = {each for each in candidates if self._can_take(each, route)}
            others = set(self._policy.replicas) - able
            if not able:
                route.chosen = None
                return None
            exclude = others if able <= route.tried else others | route.tried
            route.chosen = self._policy.choose(route.names, route.tokens, route.session, exclude=exclude)
            route.last = able <= route.tried | {route.chosen}
            route.expected = self._policy.expected_tokens
        route.seconds = time.perf_counter() - started
        return route.chosen

    def _can_take(self, replica: str, route: Route) -> bool:
        """One with less memory for a sequence than others would cut answers short."""
        return (
            self._weights.get(replica) == route.weights
            and self._contexts[replica] >= route.max_context
            and route.only in (None, replica)
        )

    def names(self, prompt: bytes, space: bytes) -> list[bytes]:
        """The names of a prompt's whole blocks, as the prefix caches of replicas name them (kv/paged/prefix_cache.py):
        blocks that everyone shares first, as far as any replica has them, then those of the prompt's own space."""
        size, step = self._block_tokens, self._block_tokens * TOKEN_BYTES
        if space == COMMON_SPACE or not self._held(chain(root_name(COMMON_SPACE), prompt[:step], size)):
            return chain(root_name(space), prompt, size)
        common = chain(root_name(COMMON_SPACE), prompt, size)
        common = common[: self._held(common)]
        return [*common, *chain(root_name(space, common[-1]), prompt[len(common) * step :], size)]

    def _held(self, names: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, some replica has."""
        if self._index is None or not names:
            return 0
        with self._lock:
            found = self._index.lookup(short_hashes(names), time.monotonic())
        return max((blocks for blocks, _ in found), default=0)


def _make_policy(routing: str, block_tokens: int, alone: bool) -> RoutingPolicy:
    """Ingresses that draw differently do not all run to the same replica."""
    seed = secrets.randbits(32)
    if routing == PrefixPolicy.name:
        return PrefixPolicy(seed=seed, block_tokens=block_tokens, sample=None if alone else _SAMPLE)
    return POLICIES[routing](seed=seed, block_tokens=block_tokens)


_VIEWS: dict[str, RoutingView] = {}


_REPLICAS: dict[str, Mapping[str, Address]] = {}


def share_view(model: str, view: RoutingView) -> None:
    """Let the router of this process find it."""
    _VIEWS[model] = view
    view.tell(_REPLICAS.get(model, {}))


def tell_replicas(model: str, replicas: Mapping[str, Address]) -> None:
    """The router tells which replicas there are; it may be there before the view."""
    _REPLICAS[model] = replicas
    if (view := shared_view(model)) is not None:
        view.tell(replicas)


def shared_view(model: str) -> RoutingView | None:
    return _VIEWS.get(model)
