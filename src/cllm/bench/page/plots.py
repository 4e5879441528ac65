"""Which plots a result has, and what is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cllm.bench.answer import Answer
from cllm.bench.figures import OURS, Run, sides
from cllm.bench.page.svg import Bar, Point, Series, bar_plot, line_plot
from cllm.bench.report import Result, with_unit
from cllm.bench.watch import Sample

_MOST_DOTS = 500
_PERCENTS = [*range(100), 99.5, 100]


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    svg: str
    legend: Sequence[tuple[str, int]]
    """Names and their colours; empty where the plot names everything itself."""


def plots_of(result: Result) -> Iterator[Plot]:
    """All plots of one workload that have something to show."""
    if any(run.answers for run in result.runs):
        yield from _latency(result)
        yield from _percentiles(result)
    yield from _over_time(result)
    yield from _curves(result)


def beside_peers(results: Iterable[Result]) -> Plot | None:
    """How many times better we are, workload by workload, with intervals."""
    bars = []
    peers: dict[str, int] = {}
    for result in results:
        row = next((row for row in result.rows if row.figure.key == result.headline), None)
        for peer, beside in row.peers.items() if row else ():
            if row and beside.ratio:
                colour = peers.setdefault(peer, len(peers) + 1)
                label = f"{result.label}: {row.figure.label}"
                bars.append(Bar(_short(label), *beside.ratio, colour, with_unit(beside.ratio, "x")))
    if not bars:
        return None
    svg = bar_plot(bars, x_label="times better than the peer, 95 % interval", reference=1.0)
    return Plot("Beside the peers", svg, [(f"against {peer}", colour) for peer, colour in peers.items()])


def over_concurrency(results: Iterable[Result]) -> Iterator[Plot]:
    """Throughput against the number of clients, for each work that was done with several."""
    works: dict[str, dict[int, Result]] = {}
    for result in results:
        if result.swept is not None:
            works.setdefault(result.swept.work, {})[result.swept.clients] = result
    for work, by_clients in works.items():
        if len(by_clients) > 1:
            series = list(_speeds(dict(sorted(by_clients.items()))))
            title = f"Throughput against concurrency: {work}"
            yield from _plot(title, series, "clients at once", "tokens out per second", log_x=True)


def _speeds(by_clients: dict[int, Result]) -> Iterator[Series]:
    names = dict.fromkeys(side for result in by_clients.values() for side in sides(result.runs))
    for colour, side in enumerate(names):
        points = []
        for clients, result in by_clients.items():
            speeds = [run.metrics["tokens_per_s"] for run in _runs(result, side) if "tokens_per_s" in run.metrics]
            if speeds:
                points.append((float(clients), float(np.median(speeds))))
        if points:
            yield Series(next(iter(by_clients.values())).shown(side), points, colour, "both")


def _latency(result: Result) -> Iterator[Plot]:
    series = []
    for colour, side in enumerate(sides(result.runs)):
        points = [
            (float(number), answer.seconds * 1e3)
            for run in _runs(result, side)
            for number, answer in enumerate(run.answers, 1)
            if answer.complete
        ]
        if points:
            series.append(Series(result.shown(side), thin(points), colour, "dots"))
    yield from _plot("Latency over request number", series, "request number", "whole request, ms", log_y=_wide(series))


def _percentiles(result: Result) -> Iterator[Plot]:
    kinds: list[tuple[str, str, Callable[[Answer], list[float]]]] = [
        ("Time to first token, percentiles", "ms", lambda answer: [answer.ttft]),
        ("Between tokens, percentiles", "ms", lambda answer: answer.gaps),
        ("Whole request, percentiles", "ms", lambda answer: [answer.seconds]),
    ]
    for title, unit, take in kinds:
        series = []
        for colour, side in enumerate(sides(result.runs)):
            complete = [answer for run in _runs(result, side) for answer in run.answers if answer.complete]
            values = [value * 1e3 for answer in complete for value in take(answer)]
            if len(values) > 1:
                heights = np.percentile(values, _PERCENTS).tolist()
                series.append(Series(result.shown(side), list(zip(_PERCENTS, heights, strict=True)), colour))
        yield from _plot(title, series, "percentile", unit, log_y=True)


def _over_time(result: Result) -> Iterator[Plot]:
    resident = _sampled(result, lambda sample: sample.resident_mb)
    yield from _plot("Resident memory over time", resident, "seconds", "MB")
    cpu = _sampled(result, lambda sample: sample.cpu_percent)
    yield from _plot("CPU use over time", cpu, "seconds", "% of one core")
    kinds: list[tuple[str, Callable[[Sample], float | None]]] = [
        ("held by running requests", lambda sample: sample.kv_running_mb),
        ("cached", lambda sample: sample.kv_cached_mb),
    ]
    kv = [
        Series(name, one.points, colour)
        for colour, (name, take) in enumerate(kinds)
        for one in _sampled(result, take, only=OURS)
    ]
    yield from _plot("KV memory over time", kv, "seconds", "MB")
    scattered = _sampled(result, lambda sample: sample.fragmentation_percent, only=OURS)
    yield from _plot("KV fragmentation over time", scattered, "seconds", "% of free blocks outside the largest run")


def _curves(result: Result) -> Iterator[Plot]:
    """What the workload itself wants drawn, out of its last repeat."""
    last = {run.side: run for run in result.runs}
    curves = [curve for run in last.values() for curve in run.curves]
    for title in dict.fromkeys(curve.plot for curve in curves):
        shown = [curve for curve in curves if curve.plot == title]
        series = [Series(curve.name, curve.points, colour, "both") for colour, curve in enumerate(shown)]
        yield from _plot(title, series, shown[0].x_label, shown[0].y_label, log_x=True, log_y=_wide(series))


def _sampled(result: Result, take: Callable[[Sample], float | None], only: str | None = None) -> list[Series]:
    """One line for each side, out of its last pass."""
    series = []
    for colour, side in enumerate(sides(result.runs)):
        runs = _runs(result, side)
        if not runs or (only is not None and side != only):
            continue
        points = [(s.seconds, value) for s in runs[-1].samples if (value := take(s)) is not None]
        if len(points) > 1:
            series.append(Series(result.shown(side), thin(points), colour))
    return series


def thin(points: Sequence[Point]) -> list[Point]:
    """As many as can be told apart, evenly spread; the first and the last stay."""
    if len(points) <= _MOST_DOTS:
        return list(points)
    chosen = np.unique(np.linspace(0, len(points) - 1, _MOST_DOTS).round().astype(int))
    return [points[index] for index in chosen]


def _plot(
    title: str, series: Sequence[Series], x_label: str, y_label: str, *, log_x: bool = False, log_y: bool = False
) -> Iterator[Plot]:
    if series:
        svg = line_plot(series, x_label=x_label, y_label=y_label, log_x=log_x, log_y=log_y)
        yield Plot(title, svg, _legend(series))


def _legend(series: Sequence[Series]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((one.name, one.colour) for one in series))


def _runs(result: Result, side: str) -> list[Run]:
    return [run for run in result.runs if run.side == side]


def _wide(series: Sequence[Series]) -> bool:
    """Whether the values are so far apart that a linear axis would hide most of them."""
    heights = [y for one in series for _, y in one.points if y > 0]
    return bool(heights) and max(heights) > 8 * min(heights)


def _short(label: str, most: int = 42) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
