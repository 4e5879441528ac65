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
) -> Result:
    """Run the whole trace. Ctrl-C ends it early; the result has what was simulated so far and says so."""
    cluster = Cluster(trace, settings, cost)
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
    """Whatever is next in time happens next: a step of the server that is furthest behind, a report, an arrival.

    A step causes nothing before its server's clock, so nobody arrives in the past of a server that waits its turn.
    """

    def __init__(self, trace: Trace, settings: Settings, cost: CostModel) -> None:
        self.tally = Tally()
        self.arrived = 0
        self.servers = [
            SimulatedServer(settings, cost, self.tally, partial(self._on_end, place))
            for place in range(settings.replicas)
        ]
        self._router = Router(settings, self.servers)
        self._source = iter(trace)
        self._upcoming: TracedRequest | None = None
        self._followers: list[tuple[float, int, int, TracedRequest]] = []
        """Arrival, the server that answered what they follow, and a number that keeps their order."""
        self._numbers = count()
        self._busy: list[tuple[float, int]] = []
        """The clock and the place of every server that has work."""

    def run(self, on_progress: OnProgress | None = None) -> None:
        while True:
            self._upcoming = self._upcoming or next(self._source, None)
            arrival = min(
                math.inf if self._upcoming is None else self._upcoming.arrival,
                self._followers[0][0] if self._followers else math.inf,
            )
            if self._busy and self._busy[0][0] < min(arrival, self._router.next_report):
                self._step(self._busy[0][1])
            elif arrival == math.inf and not self._busy:
                return
            elif self._router.next_report <= arrival:
                if not self._busy:
                    self._router.skip_reports(arrival)
                self._router.report()
            else:
                self._arrive(arrival)
                if on_progress is not None and self.arrived % _PROGRESS_EVERY == 0:
                    on_progress(self.arrived, self.tally.computed_tokens, arrival)

    def _step(self, place: int) -> None:
        server = self.servers[place]
        server.step()
        if server.busy:
            heapq.heapreplace(self._busy, (server.now, place))
        else:
            heapq.heappop(self._busy)

    def _arrive(self, moment: float) -> None:
        traced = self._next()
        place = self._router.route(traced, moment)
        server = self.servers[place]
        was_busy = server.busy
        server.submit(traced, moment)
        self.arrived += 1
        if server.busy and not was_busy:
            heapq.heappush(self._busy, (server.now, place))

    def _next(self) -> TracedRequest:
        """The request that arrives first; of two at once, the one in the trace."""
        upcoming = self._upcoming
        if upcoming is None or (self._followers and self._followers[0][0] < upcoming.arrival):
            return heapq.heappop(self._followers)[-1]
        self._upcoming = None
        return upcoming

    def _on_end(self, place: int, traced: TracedRequest, moment: float) -> None:
        for follower in traced.followers:
            heapq.heappush(self._followers, (moment + follower.arrival, place, next(self._numbers), follower))


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
