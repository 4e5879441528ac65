"""The policies of `cllm.routing` in front of simulated servers, which report to it late, as real ones do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cllm.kv.block_names import chain, root_name
from cllm.kv.events import KVEvent, Listener
from cllm.routing.index import QUIET_S, PrefixIndex
from cllm.routing.policy import POLICIES, PrefixPolicy, ReplicaStats, RoutingPolicy
from cllm_bench.simulate.server import SimulatedServer
from cllm_bench.simulate.settings import Settings
from cllm_bench.simulate.traces import TracedRequest, spell

_ROOT = root_name()

_SAMPLE = 2
"""What a router that is not alone gives to a server for its load alone goes to the better one of so many, so that all
routers do not choose the same one."""


@dataclass(frozen=True, slots=True)
class _Report:
    """What all servers reported at one moment."""

    measured_at: float
    stats: Sequence[ReplicaStats]
    events: Sequence[Sequence[KVEvent]]


class Router:
    """One or several routers. Servers report every `report_s` seconds, and each report takes that long to arrive."""

    def __init__(self, settings: Settings, servers: Sequence[SimulatedServer]) -> None:
        self._servers = servers
        self._report_s = settings.report_s
        self._block_tokens = settings.block_size
        self._policies = [_make_policy(settings, number) for number in range(settings.routers)]
        self._routed = 0
        self._under_way: _Report | None = None
        reads_events = self._policies[0].index is not None
        self._listeners: list[Listener | None] = [server.kv.listen() for server in servers] if reads_events else []
        for policy in self._policies:
            for place in range(len(servers)):
                policy.add(str(place), 0.0)
                self._take_snapshot(policy, place, 0.0)
        self.next_report = settings.report_s if self._policies[0].reads_stats and len(servers) > 1 else math.inf
        """All servers must have reached this moment before anything later is routed."""

    def route(self, traced: TracedRequest, moment: float) -> int:
        if len(self._servers) == 1:
            return 0
        policy = self._policies[self._routed % len(self._policies)]
        self._routed += 1
        names = chain(_ROOT, spell(traced.prompt), self._block_tokens) if policy.reads_prompt else ()
        return int(policy.choose(names, traced.prompt_length, now=moment))

    def report(self) -> None:
        """The servers have reached `next_report`: the last report arrives, and a new one is on its way."""
        now, arrived = self.next_report, self._under_way
        self.next_report = now + self._report_s
        events = [listener.take() if listener is not None else [] for listener in self._listeners]
        self._under_way = _Report(now, [server.stats() for server in self._servers], events)
        if arrived is not None:
            for policy in self._policies:
                self._learn(policy, arrived, now)

    def _learn(self, policy: RoutingPolicy, arrived: _Report, now: float) -> None:
        for place, stats in enumerate(arrived.stats):
            policy.report(str(place), stats, arrived.measured_at)
        index = policy.index
        if index is not None:
            for place, each in enumerate(arrived.events):
                index.apply(str(place), each, now)
            for replica in index.unknown():
                self._take_snapshot(policy, int(replica), now)

    def skip_reports(self, until: float) -> None:
        """No server has had anything to do: reports that say the same are left out."""
        periods = (until - self.next_report) // self._report_s - 2
        if periods > 0:
            self.next_report += periods * self._report_s

    def _take_snapshot(self, policy: RoutingPolicy, place: int, now: float) -> None:
        if policy.index is not None and self._listeners[place] is not None:
            number, names = self._servers[place].kv.held_names()
            policy.index.snapshot(str(place), number, names, now)


def _make_policy(settings: Settings, number: int) -> RoutingPolicy:
    if settings.routing != PrefixPolicy.name:
        return POLICIES[settings.routing](block_tokens=settings.block_size, seed=number)
    return PrefixPolicy(
        block_tokens=settings.block_size,
        seed=number,
        index=PrefixIndex(settings.index_blocks, quiet_s=max(QUIET_S, 4 * settings.report_s)),
        sample=_SAMPLE if settings.routers > 1 else None,
    )
