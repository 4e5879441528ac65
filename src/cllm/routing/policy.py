"""Policies: which replica gets a request.

All know the load of each replica: what it last reported, and what this router has sent since that report was made. The
unit is a token of a prompt that has to be computed.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from itertools import repeat
from operator import add, mul
from random import Random
from typing import NamedTuple

from cllm.errors import CLLMError
from cllm.routing.index import PrefixIndex, short_hashes

ROW_TOKENS = 64
"""What a sequence that generates counts, in tokens of prompts."""

SENT_S = 30.0
"""What was sent counts for this long if no report comes."""

CACHE_WEIGHT = 2.5
"""What a cached token counts against a token of load: it saves work, memory, and the wait of those that come after."""

RECENT_WEIGHT = 0.75
RECENT_S = 60.0
"""What a replica was given lately counts with this weight, less and less: with little to do all around, caches should
fill evenly."""

IMBALANCE = 1.25
SPARE_TOKENS = 2048
"""A replica with this many times the mean load, and this much more, gets nothing for the sake of its cache."""

MOST_SESSIONS = 65_536
KEY_BLOCKS = 8
"""Consistent hashing goes by this many leading blocks of a prompt without a session."""

_OLDEST = 50.0
"""In `RECENT_S`: before e to that power, which work is multiplied by, becomes too large for a float."""
_POINTS = 64
"""Points that each replica has on the ring."""


class NoReplicaError(CLLMError):
    """There is no replica to choose."""

    def __init__(self) -> None:
        super().__init__("no replica is available")


class ReplicaStats(NamedTuple):
    """What a replica reports every now and then."""

    queued_tokens: int
    """Tokens of prompts that are not computed yet, of requests that wait or run."""
    rows: int
    """Sequences that wait or run."""


class _Asked(NamedTuple):
    """A request that needs a replica."""

    names: Sequence[bytes]
    """The whole blocks of its prompt."""
    tokens: int
    session: str | None
    now: float


class RoutingPolicy(ABC):
    """Replicas come and go with `add` and `remove`; `report` brings their stats. `now` is any clock that only rises."""

    name: str
    reads_stats = True
    """Whether `report` makes a difference."""
    reads_prompt = True
    """Whether the blocks of the prompt make a difference."""
    index: PrefixIndex | None = None
    """What replicas have cached, for those that go by it."""

    def __init__(self, *, seed: int = 0, block_tokens: int = 16) -> None:
        self._random = Random(seed)
        self._block_tokens = block_tokens
        self._loads: dict[str, float] = {}
        """By replica: what it reported, and what was sent since."""
        self._reported: dict[str, float] = {}
        self._sent: dict[str, deque[tuple[float, int]]] = {}
        self._next_expiry = 0.0
        self.expected_tokens = 0
        """How many tokens of the last prompt that `choose` was called for its replica is expected to have cached."""

    @property
    def replicas(self) -> Sequence[str]:
        return tuple(self._loads)

    def add(self, replica: str, now: float | None = None) -> None:
        if replica in self._loads:
            return
        self._loads[replica] = self._reported[replica] = 0.0
        self._sent[replica] = deque()
        if self.index is not None:
            self.index.add(replica, _time(now))

    def remove(self, replica: str) -> None:
        """It is dead or drains: it is never chosen again."""
        if replica not in self._loads:
            return
        del self._loads[replica], self._reported[replica], self._sent[replica]
        if self.index is not None:
            self.index.remove(replica)

    def report(self, replica: str, stats: ReplicaStats, measured_at: float) -> None:
        """The stats of a replica; what was sent to it after `measured_at` is added."""
        if replica not in self._loads:
            return
        self._reported[replica] = stats.queued_tokens + ROW_TOKENS * stats.rows
        self._forget_sent(replica, measured_at)

    def load(self, replica: str) -> float:
        return self._loads[replica]

    def choose(
        self,
        prompt_hashes: Sequence[bytes],
        prompt_tokens: int,
        session: str | None = None,
        *,
        now: float | None = None,
        exclude: Collection[str] = (),
    ) -> str:
        """The replica for a prompt, by the names of its whole blocks (kv/block_names.py). `exclude` has replicas that
        were tried already. If nobody is left, the call changes nothing."""
        if all(name in exclude for name in self._loads):
            raise NoReplicaError
        moment = _time(now)
        self._expire_sent(moment)
        loads = {name: load for name, load in self._loads.items() if name not in exclude} if exclude else self._loads
        replica, cached_tokens = self._choose(loads, _Asked(prompt_hashes, prompt_tokens, session, moment))
        self.expected_tokens = cached_tokens
        work = max(prompt_tokens - cached_tokens, 0) + ROW_TOKENS
        self._sent[replica].append((moment, work))
        self._loads[replica] += work
        return replica

    @abstractmethod
    def _choose(self, loads: Mapping[str, float], asked: _Asked) -> tuple[str, int]:
        """One of the replicas in `loads`, and the tokens of the prompt that it is expected to have cached."""

    def _least_loaded(self, loads: Mapping[str, float]) -> str:
        """Any of those with the lowest load."""
        lowest = min(loads.values())
        return self._random.choice([replica for replica, load in loads.items() if load == lowest])

    def _forget_sent(self, replica: str, until: float) -> None:
        sent = self._sent[replica]
        while sent and sent[0][0] <= until:
            sent.popleft()
        self._loads[replica] = self._reported[replica] + sum(work for _, work in sent)

    def _expire_sent(self, now: float) -> None:
        """Without reports, what was sent must not count forever."""
        if now >= self._next_expiry:
            self._next_expiry = now + SENT_S / 10
            for replica, sent in self._sent.items():
                if sent and sent[0][0] <= now - SENT_S:
                    self._forget_sent(replica, now - SENT_S)


def overload(loads: Mapping[str, float]) -> float:
    """The load above which a replica is a hot spot."""
    return IMBALANCE * sum(loads.values()) / len(loads) + SPARE_TOKENS


class RandomPolicy(RoutingPolicy):
    name = "random"
    reads_stats = reads_prompt = False

    def _choose(self, loads: Mapping[str, float], asked: _Asked) -> tuple[str, int]:
        return self._random.choice(list(loads)), 0


class RoundRobin(RoutingPolicy):
    name = "round-robin"
    reads_stats = reads_prompt = False
    _turn = -1

    def _choose(self, loads: Mapping[str, float], asked: _Asked) -> tuple[str, int]:
        self._turn += 1
        return list(loads)[self._turn % len(loads)], 0


class LeastLoaded(RoutingPolicy):
    name = "least-loaded"
    reads_prompt = False

    def _choose(self, loads: Mapping[str, float], asked: _Asked) -> tuple[str, int]:
        return self._least_loaded(loads), 0


class ConsistentHash(RoutingPolicy):
    """By session, or by the first blocks of the prompt, on a ring of replicas; past those that are overloaded."""

    name = "consistent-hash"

    def __init__(self, *, seed: int = 0, block_tokens: int = 16) -> None:
        super().__init__(seed=seed, block_tokens=block_tokens)
        self._ring: list[tuple[int, str]] = []

    def add(self, replica: str, now: float | None = None) -> None:
        if replica not in self._loads:
            for point in range(_POINTS):
                insort(self._ring, (_point(f"{replica} {point}".encode()), replica))
        super().add(replica, now)

    def remove(self, replica: str) -> None:
        self._ring = [point for point in self._ring if point[1] != replica]
        super().remove(replica)

    def _choose(self, loads: Mapping[str, float], asked: _Asked) -> tuple[str, int]:
        if asked.session is None and not asked.names:
            return self._least_loaded(loads), 0
        key = asked.names[min(len(asked.names), KEY_BLOCKS) - 1] if asked.session is None else asked.session.encode()
        start = bisect_left(self._ring, (_point(key), ""))
        limit = overload(loads)
        for step in range(len(self._ring)):
            replica = self._ring[(start + step) % len(self._ring)][1]
            if loads.get(replica, math.inf) <= limit:
                return replica, 0
        return self._least_loaded(loads), 0


class PrefixPolicy(RoutingPolicy):
    """The least work until the first token: what a replica has to do already, and what of the prompt it does not have.

    A hot spot gets nothing for the sake of its cache, so a prefix that is asked for too often gets a second home. With
    nothing cached the least loaded gets the request; among several routers, the less loaded of `sample` random ones, so
    that they do not all run to the same one.
    """

    name = "prefix"

    def __init__(
        self,
        *,
        seed: int = 0,
        block_tokens: int = 16,
        index: PrefixIndex | None = None,
        sample: int | None = None,
    ) -> None:
        super().__init__(seed=seed, block_tokens=block_tokens)
        self.index: PrefixIndex = index if index is not None else PrefixIndex()
        self._sample = sample
        self._sessions: OrderedDict[str, tuple[str, int]] = OrderedDict()
        """Session -> the replica it was last sent to, and the tokens of its prompt."""
        self._recent: dict[str, float] = {}
        """Work given to each replica, as if it had been at `_recent_at`: multiplied by e for each `RECENT_S` later. In
        the order of `_loads`."""
        self._recent_at = 0.0

    def add(self, replica: str, now: float | None = None) -> None:
        super().add(replica, now)
        self._recent.setdefault(replica, 0.0)

    def remove(self, replica: str) -> None:
        super().remove(replica)
        self._recent.pop(replica, None)

    def _choose(self, loads: Mapping[str, float], asked: _Asked) -> tuple[str, int]:
        hashes = short_hashes(asked.names)
        growth = self._recent_growth(asked.now)
        recent = self._recent
        loads = self._with_recent(loads, RECENT_WEIGHT / growth)
        best, blocks, saved = self._least_loaded(self._sampled(loads)), 0, 0
        lowest, limit = loads[best], overload(loads)
        for held, replicas in self.index.lookup(hashes, asked.now):
            if best in replicas:  # what was chosen by its load alone may have some of it, too
                blocks, saved = held, self._tokens(held, asked.tokens)
                lowest = loads[best] - CACHE_WEIGHT * saved
            among = replicas if len(loads) == len(self._loads) else [each for each in replicas if each in loads]
            if not among:
                continue
            replica = min(among, key=loads.__getitem__)
            work = loads[replica] - CACHE_WEIGHT * self._tokens(held, asked.tokens)
            if work < lowest and loads[replica] <= limit:
                best, blocks, saved, lowest = replica, held, self._tokens(held, asked.tokens), work
        if asked.session is not None:
            best, blocks, saved = self._by_session(loads, asked.session, asked, (best, blocks, saved), limit)
        self.index.expect(best, hashes[blocks:], asked.now)
        recent[best] += growth * (asked.tokens - saved + ROW_TOKENS)
        return best, saved

    def _with_recent(self, loads: Mapping[str, float], weight: float) -> dict[str, float]:
        """The loads and what was given lately. Of all replicas in one go: there may be a thousand."""
        if len(loads) == len(self._recent):
            weighted = map(mul, self._recent.values(), repeat(weight))
            return dict(zip(loads, map(add, loads.values(), weighted), strict=True))
        return {replica: load + weight * self._recent[replica] for replica, load in loads.items()}

    def _recent_growth(self, now: float) -> float:
        age = (now - self._recent_at) / RECENT_S
        if age > _OLDEST:
            self._recent = {replica: work * math.exp(-age) for replica, work in self._recent.items()}
            self._recent_at, age = now, 0.0
        return math.exp(age)

    def _tokens(self, blocks: int, prompt_tokens: int) -> int:
        """At least one token of a prompt is always computed."""
        return min(blocks * self._block_tokens, prompt_tokens - 1)

    def _sampled(self, loads: Mapping[str, float]) -> Mapping[str, float]:
        if self._sample is None or self._sample >= len(loads):
            return loads
        return {replica: loads[replica] for replica in self._random.sample(list(loads), self._sample)}

    def _by_session(
        self, loads: Mapping[str, float], session: str, asked: _Asked, chosen: tuple[str, int, int], limit: float
    ) -> tuple[str, int, int]:
        """Where a session was last, it left its prompt: all that is known of a replica without events."""
        last, last_tokens = self._sessions.get(session, ("", 0))
        if last in loads and loads[last] <= limit and not self.index.knows(last, asked.now):
            guess = min(last_tokens, asked.tokens - 1)
            if loads[last] - CACHE_WEIGHT * guess < loads[chosen[0]] - CACHE_WEIGHT * chosen[2]:
                chosen = last, 0, guess
        self._sessions[session] = chosen[0], asked.tokens
        self._sessions.move_to_end(session)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return chosen


POLICIES: dict[str, type[RoutingPolicy]] = {
    policy.name: policy for policy in (RoundRobin, PrefixPolicy, RandomPolicy, LeastLoaded, ConsistentHash)
}


def _time(now: float | None) -> float:
    return time.monotonic() if now is None else now


def _point(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
