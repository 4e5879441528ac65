"""The policies of `cllm.routing` in front of simulated servers, which report to it late, as real ones do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cllm.kv.block_names import chain, root_name
from cllm.kv.events import KVEvent, Listener
from cllm.routing.index import MOST_BLOCKS, QUIET_S, PrefixIndex
from cllm.routing.policy import POLICIES, PrefixPolicy, ReplicaStats, RoutingPolicy
from cllm.simulate.server import SimulatedServer
from cllm.simulate.settings import Settings
from cllm.simulate.traces import TracedRequest, spell

_ROOT = root_name(b"")


@dataclass(frozen=True, slots=True)
class _Report:
    """What all servers reported at one moment."""

    measured_at: float
    stats: Sequence[ReplicaStats]
    events: Sequence[Sequence[KVEvent]]


class Router:
    """Servers report every `report_s` seconds, and each report takes that long to arrive."""

    def __init__(self, settings: Settings, servers: Sequence[SimulatedServer]) -> None:
        self._servers = servers
        self._report_s = settings.report_s
        self._block_tokens = settings.block_size
        self._policy = _make_policy(settings)
        self._under_way: _Report | None = None
        self._listeners: list[Listener | None] = []
        for place, server in enumerate(servers):
            self._policy.add(str(place), 0.0)
            if self._policy.index is not None:
                self._listeners.append(server.kv.listen())
                self._take_snapshot(place, 0.0)
        self.next_report = settings.report_s if self._policy.reads_stats and len(servers) > 1 else math.inf
        """All servers must have reached this moment before anything later is routed."""

    def route(self, traced: TracedRequest, moment: float) -> int:
        if len(self._servers) == 1:
            return 0
        names = chain(_ROOT, spell(traced.prompt), self._block_tokens) if self._policy.reads_prompt else ()
        return int(self._policy.choose(names, traced.prompt_length, now=moment))

    def report(self) -> None:
        """The servers have reached `next_report`: the last report arrives, and a new one is on its way."""
        now, arrived = self.next_report, self._under_way
        self.next_report = now + self._report_s
        events = [listener.take() if listener is not None else [] for listener in self._listeners]
        self._under_way = _Report(now, [server.stats() for server in self._servers], events)
        if arrived is None:
            return
        for place, stats in enumerate(arrived.stats):
            self._policy.report(str(place), stats, arrived.measured_at)
        index = self._policy.index
        if index is not None:
            for place, each in enumerate(arrived.events):
                index.apply(str(place), each, now)
            for replica in index.unknown():
                self._take_snapshot(int(replica), now)

    def skip_reports(self, until: float) -> None:
        """No server has had anything to do: reports that say the same are left out."""
        periods = (until - self.next_report) // self._report_s - 2
        if periods > 0:
            self.next_report += periods * self._report_s

    def _take_snapshot(self, place: int, now: float) -> None:
        index = self._policy.index
        if index is not None and self._listeners[place] is not None:
            number, names = self._servers[place].kv.held_names()
            index.snapshot(str(place), number, names, now)


def _make_policy(settings: Settings) -> RoutingPolicy:
    if settings.routing != PrefixPolicy.name:
        return POLICIES[settings.routing](block_tokens=settings.block_size)
    index = PrefixIndex(
        max(MOST_BLOCKS, settings.replicas * settings.blocks), quiet_s=max(QUIET_S, 4 * settings.report_s)
    )
    return PrefixPolicy(block_tokens=settings.block_size, index=index)
