"""A trace driven through one simulated server, or through several behind a router."""

from __future__ import annotations

import gc
import heapq
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count

from cllm_bench.simulate.cost import CostModel
from cllm_bench.simulate.lookahead import Lookahead
from cllm_bench.simulate.results import Result, figures_of
from cllm_bench.simulate.routing import Router
from cllm_bench.simulate.server import SimulatedServer
from cllm_bench.simulate.settings import Settings, Value
from cllm_bench.simulate.tally import Tally
from cllm_bench.simulate.traces import Trace, TracedRequest

OnProgress = Callable[[int, int, float], None]
"""Called now and then with the requests that have arrived, the tokens computed, and the simulated time."""

_PROGRESS_EVERY = 64


def simulate(
    trace: Trace,
    settings: Settings,
    cost: CostModel,
    *,
    varied: Mapping[str, Value] | None = None,
    on_progress: OnProgress | None = None,
    fast_forward: bool = True,
) -> Result:
    """Run the whole trace. Ctrl-C ends it early; the result has what was simulated so far and says so."""
    cluster = Cluster(trace, settings, cost, fast_forward=fast_forward)
    started = time.perf_counter()
    interrupted = False
    with without_garbage_collection():
        try:
            cluster.run(on_progress)
        except KeyboardInterrupt:
            interrupted = True
    wall_s = time.perf_counter() - started
    never_sent = 0 if interrupted else trace.requests - cluster.arrived
    figures = figures_of(cluster.tally, cluster.servers, arrived=cluster.arrived, never_sent=never_sent, wall_s=wall_s)
    return Result(settings, varied or {}, trace.name, cost.name, figures, sorted(cluster.tally.samples), interrupted)


class Cluster:
    """Requests are routed in the order in which they arrive. A server is brought to a moment only when a request comes
    to it, when it reports, or when somebody who follows one of its requests might be the next to arrive."""

    def __init__(self, trace: Trace, settings: Settings, cost: CostModel, *, fast_forward: bool = True) -> None:
        self.tally = Tally()
        self.arrived = 0
        self.servers = [
            SimulatedServer(settings, cost, self.tally, partial(self._on_end, place), fast_forward=fast_forward)
            for place in range(settings.replicas)
        ]
        self._router = Router(settings, self.servers)
        self._trace = trace
        self._followers: list[tuple[float, int, int, TracedRequest]] = []
        """Arrival, the server that answered what they follow, and a number, so that the order does not depend on which
        server was simulated first."""
        self._numbers = count()
        self._lookahead = Lookahead(self.servers)

    def run(self, on_progress: OnProgress | None = None) -> None:
        for traced, moment in self._arrivals():
            place = self._router.route(traced, moment)
            server = self.servers[place]
            server.reach(moment)
            number = server.submit(traced, moment)
            if number is not None and traced.followers:
                self._lookahead.add(place, number, traced)
            self.arrived += 1
            if on_progress is not None and self.arrived % _PROGRESS_EVERY == 0:
                on_progress(self.arrived, self.tally.computed_tokens, moment)
        for server in self.servers:
            server.reach(math.inf)

    def _on_end(self, place: int, traced: TracedRequest, moment: float) -> None:
        for follower in traced.followers:
            heapq.heappush(self._followers, (moment + follower.arrival, place, next(self._numbers), follower))

    def _arrivals(self) -> Iterator[tuple[TracedRequest, float]]:
        """Requests in the order in which they arrive; followers come about while the servers work."""
        source = iter(self._trace)
        upcoming = next(source, None)
        while True:
            self._work_until_next_arrival(upcoming.arrival if upcoming is not None else math.inf)
            if self._followers and (upcoming is None or self._followers[0][0] < upcoming.arrival):
                moment, _, _, follower = heapq.heappop(self._followers)
                yield follower, moment
            elif upcoming is not None:
                yield upcoming, upcoming.arrival
                upcoming = next(source, None)
            else:
                return

    def _work_until_next_arrival(self, arrival: float) -> None:
        """Until nobody can arrive sooner than those who are known to, and all reports up to then are made."""
        router, lookahead = self._router, self._lookahead
        while True:
            moment = self._next_arrival(arrival)
            until = min(moment, router.next_report)
            if lookahead.soonest < until:
                lookahead.work(until)
            elif router.next_report > moment or (moment == math.inf and lookahead.soonest == math.inf):
                return
            else:
                for server in self.servers:
                    server.reach(router.next_report)
                if not any(server.scheduler.has_work for server in self.servers):
                    router.skip_reports(self._next_arrival(arrival))
                router.report()

    def _next_arrival(self, arrival: float) -> float:
        return min(arrival, self._followers[0][0]) if self._followers else arrival


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Millions of objects would be searched for cycles again and again; a simulation leaves none behind."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
