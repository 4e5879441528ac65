"""The page of a benchmark: what must be reached, then each workload with its table and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from cllm_bench.figures import OURS, Run, sides
from cllm_bench.pages.page import Page, Section, facts_table, without_empty_columns, write_page
from cllm_bench.pages.plots import Plot, Point, Series, Style, wide
from cllm_bench.report import QUICK, Report, Result, headings, lines_of, table_lines, with_unit
from cllm_bench.response import TimedResponse
from cllm_bench.watch import Sample

_MOST_POINTS = 500
_FEWEST_VALUES = 10
"""Fewer values than this get no percentile curve."""
_PERCENTS = [*range(100), 99.5, 100]
_HOW_TO_READ = (
    "A ratio says how many times better cLLM is than the peer in the same repeat, with its 95 % interval in brackets. "
    "Met: the whole interval is on the right side of the bound. Uncertain: the bound is inside the interval; measure "
    "more repeats. A figure that was measured once has no interval, and its single value is judged."
)


def write_report(report: Report, directory: Path) -> Path:
    return write_page(page_of(report), directory)


def page_of(report: Report) -> Page:
    machine = report.machine
    warnings = [f"{title} failed: {why}" for title, why in report.failures.items()]
    if report.settings.get("quick"):
        warnings.insert(0, QUICK)
    if report.interrupted:
        warnings.insert(0, "This run was interrupted: the figures cover what was measured until then.")
    overview = list(_overview(report.results))
    facts = Section("Machine and settings", tables=[facts_table({**machine, **report.settings})])
    subtitle = f"{report.started}, {machine['cpu']}, {machine['physical_cores']} cores"
    return Page("cLLM benchmark", subtitle, [*overview, *map(_section, report.results), facts], warnings)


def _overview(results: Sequence[Result]) -> Iterator[Section]:
    rows = [
        [result.title, row.figure.label, with_unit(row.ours, row.figure.unit), *line[2:]]
        for result in results
        for row in result.rows
        for line in lines_of(row)
        if line[-2]
    ]
    if rows:
        columns = ["work", "figure", "ours", "against", "its figure", "ratio", "required", "verdict"]
        yield Section("What must be reached", _HOW_TO_READ, [without_empty_columns(rows, columns)])


@lru_cache(maxsize=64)
def _section(result: Result) -> Section:
    """Kept: the page is written after every workload, and a plot takes a tenth of a second."""
    tables = [without_empty_columns(table_lines(result), headings(result))]
    return Section(result.title, "", tables, result.notes, list(plots_of(result)))


def plots_of(result: Result) -> Iterator[Plot]:
    """All plots of one workload that have something to show."""
    yield from _of_answers(result)
    yield from _over_time(result)


def _of_answers(result: Result) -> Iterator[Plot]:
    def in_order(runs: Sequence[Run]) -> list[Point]:
        numbered = [each for run in runs for each in enumerate(run.answers, 1)]
        points = [(float(number), answer.seconds * 1e3) for number, answer in numbered if answer.complete]
        return points if len({number for number, _ in points}) > 1 else []

    title = "Latency over request number"
    caption = "How long each request took, in the order in which they were sent. Flat: nothing gets slower."
    series = _by_side(result, in_order, "dots")
    log_y = wide([y for one in series for _, y in one.points])
    yield from _plot(title, caption, series, "request number", "whole request, ms", log_y=log_y)
    kinds: list[tuple[str, str, Callable[[TimedResponse], list[float]]]] = [
        ("Time to first token", "How long requests waited for their first token", lambda answer: [answer.ttft]),
        ("Between tokens", "Gaps between two tokens of a stream", lambda answer: answer.gaps),
        ("Whole request", "How long requests took from question to end", lambda answer: [answer.seconds]),
    ]
    for name, what, take in kinds:
        series = _by_side(result, partial(_percentiles, take))
        caption = f"{what}: at 95, the time that 95 % of them stayed within."
        yield from _plot(f"{name}, percentiles", caption, series, "percentile", "ms", log_y=True)


def _percentiles(take: Callable[[TimedResponse], list[float]], runs: Sequence[Run]) -> list[Point]:
    values = [value * 1e3 for run in runs for answer in run.answers if answer.complete for value in take(answer)]
    if len(values) < _FEWEST_VALUES:
        return []
    return list(zip(_PERCENTS, np.percentile(values, _PERCENTS).tolist(), strict=True))


def _over_time(result: Result) -> Iterator[Plot]:
    kinds: list[tuple[str, str, str, Callable[[Sample], float | None]]] = [
        ("Resident memory", "Physical memory of the server's process.", "MB", lambda sample: sample.resident_mb),
        ("CPU use", "Of the server's process; 100 % is one core.", "% of one core", lambda sample: sample.cpu_percent),
        (
            "KV fragmentation",
            "Free KV blocks outside the largest free run.",
            "% of free blocks",
            lambda sample: sample.fragmentation_percent,
        ),
    ]
    for title, caption, unit, take in kinds:
        series = _by_side(result, partial(_sampled, take))
        yield from _plot(f"{title} over time", caption, series, "seconds", unit)
    kv = {
        "held by running requests": _sampled(lambda sample: sample.kv_running_mb, result.runs_of(OURS)),
        "cached": _sampled(lambda sample: sample.kv_cached_mb, result.runs_of(OURS)),
    }
    series = [Series(name, points, colour) for colour, (name, points) in enumerate(kv.items()) if len(points) > 1]
    caption = "K/V of running requests, and what is cached for later ones."
    yield from _plot("KV memory over time", caption, series, "seconds", "MB")


def _sampled(take: Callable[[Sample], float | None], runs: Sequence[Run]) -> list[Point]:
    """Out of the last pass."""
    samples = [sample for run in runs[-1:] for sample in run.samples]
    return [(sample.seconds, value) for sample in samples if (value := take(sample)) is not None]


def _by_side(result: Result, points_of: Callable[[Sequence[Run]], list[Point]], style: Style = "line") -> list[Series]:
    """A series for each side that has more than one point."""
    lines = [(side, points_of(result.runs_of(side))) for side in sides(result.runs)]
    return [
        Series(result.shown(side), thin(points), colour, style)
        for colour, (side, points) in enumerate(lines)
        if len(points) > 1
    ]


def _plot(
    title: str,
    caption: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log_y: bool = False,
) -> Iterator[Plot]:
    if series:
        yield Plot(title=title, caption=caption, series=series, x_label=x_label, y_label=y_label, log_y=log_y)


def thin(points: Sequence[Point]) -> list[Point]:
    """As many as the eye can tell apart, evenly spread; the first and the last stay."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    chosen = np.unique(np.linspace(0, len(points) - 1, _MOST_POINTS).round().astype(int))
    return [points[index] for index in chosen]
