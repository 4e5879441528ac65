"""Who might arrive next because an answer ends: how far each server can be left behind.

A request that others follow is not answered before each of its missing tokens has taken a step of the shortest kind,
and its followers think before they write. So each server has a moment before which it causes no arrival. As long as
that lies ahead, nobody needs to know what the server does: it catches up later, in long strides.

    server 0   now ----------------------------------------> soonest arrival it may cause
    server 1        now -----------------> soonest            advanced first, at most to the next one's soonest
    server 2                                    now -> soonest
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from cllm_bench.simulate.server import SimulatedServer
from cllm_bench.simulate.traces import TracedRequest


class Lookahead:
    def __init__(self, servers: Sequence[SimulatedServer]) -> None:
        self._servers = servers
        self._requests: list[list[tuple[float, int, float]]] = [[] for _ in servers]
        """Of each server: the soonest moment at which somebody may follow a request, its number, and how long they
        think. True when it was written, and too early since."""
        self._soonest = [math.inf] * len(servers)
        self._order: list[tuple[float, int]] = []
        """The same of all servers; entries that differ from `_soonest` are void."""

    @property
    def soonest(self) -> float:
        """Nobody who is not known yet arrives before this."""
        order = self._order
        while order and order[0][0] != self._soonest[order[0][1]]:
            heapq.heappop(order)
        return order[0][0] if order else math.inf

    def add(self, place: int, number: int, traced: TracedRequest) -> None:
        """A server was given a request that others follow."""
        think = min(follower.arrival for follower in traced.followers)
        soonest = self._servers[place].earliest_end(number)
        assert soonest is not None
        heapq.heappush(self._requests[place], (soonest + think, number, think))
        self._note(place)

    def work(self, until: float) -> None:
        """Advance the server that may be the first to cause an arrival: to `until`, but not past what another one may
        cause, nor past an answer that somebody follows."""
        before, place = self.soonest, self._order[0][1]
        self._soonest[place] = math.inf
        server = self._servers[place]
        stood = server.now
        server.advance(min(until, self.soonest))
        if self._note(place) <= before and server.now == stood:
            # Another one is as early. Nothing is certain before one of them takes a step.
            server.advance(math.nextafter(stood, math.inf))
            self._note(place)

    def _note(self, place: int) -> float:
        """Look again at the requests that seem to be the first to end, until one really may be."""
        requests, server = self._requests[place], self._servers[place]
        soonest = math.inf
        while requests:
            noted, number, think = requests[0]
            end = server.earliest_end(number)
            if end is None:
                heapq.heappop(requests)
            elif end + think > noted:
                heapq.heapreplace(requests, (end + think, number, think))
            else:
                soonest = noted
                break
        if soonest != self._soonest[place]:
            self._soonest[place] = soonest
            if soonest < math.inf:
                heapq.heappush(self._order, (soonest, place))
        return soonest
