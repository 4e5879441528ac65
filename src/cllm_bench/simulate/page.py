"""The page of a simulation: policies side by side, or what a setting changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cllm_bench.pages.page import Page, Section, facts_table, write_page
from cllm_bench.pages.plots import AreaPlot, Bar, BarPlot, LinePlot, Plot, Series, wide
from cllm_bench.simulate.cost import CostModel
from cllm_bench.simulate.knees import RATE, RISE, WITHIN, knee, knee_figure, lines
from cllm_bench.simulate.report import short, tables
from cllm_bench.simulate.results import Result, traces_of
from cllm_bench.simulate.settings import POLICIES

_COLOURS = {policy: number for number, policy in enumerate(reversed(POLICIES))}
_UNITS = (("h", 3600), ("min", 60))
_NOTES = (
    "first, gap, request: time to the first token, between two tokens, and of the whole request",
    "waste: share of running requests' memory that holds nothing",
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure of all results."""

    figure: str
    title: str
    caption: str
    unit: str
    scale: float = 1.0

    def value(self, result: Result) -> float:
        return result.figures[self.figure] * self.scale

    def shown(self, results: Sequence[Result]) -> list[Result]:
        """The results that have the figure; none where it is zero in all of them."""
        known = [result for result in results if not math.isnan(self.value(result))]
        return known if any(map(self.value, known)) else []


_PANELS = (
    Panel("answer_tokens_per_s", "Throughput", "Tokens of all answers together; more is better.", "tokens/s"),
    Panel("ttft_p95_s", "First token, P95", "95 % of the requests had their first token within this time.", "s"),
    Panel("total_p95_s", "Whole request, P95", "95 % of the requests were complete within this time.", "s"),
    Panel("hit_rate", "Prompt from the cache", "Share of the prompt tokens that were not computed again.", "%", 100),
    Panel("waste", "Memory taken but empty", "Share of running requests' memory that holds nothing.", "%", 100),
)
_GAPS = Panel("token_gap_p99_s", "Between tokens, P99", "99 % of the gaps between two tokens were shorter.", "ms", 1000)
_SWEEP_PANELS = (*_PANELS, _GAPS)
_THROUGHPUT, _, _TOTAL, _HITS, _ = _PANELS
_CLUSTER_PANELS = (
    _HITS,
    Panel("ttft_p50_s", "First token, P50", "Half of the requests had their first token within this time.", "s"),
    Panel("ttft_p99_s", "First token, P99", "99 % of the requests had their first token within this time.", "s"),
    Panel("balance", "Busiest / mean", "Tokens computed by the busiest server, over the mean of all.", "times"),
    _THROUGHPUT,
    _TOTAL,
)
"""With several servers."""


def write_report(results: Sequence[Result], cost: CostModel, directory: Path) -> Path:
    warnings = ["This simulation was interrupted: the last result covers what was simulated until then."]
    shared = set.intersection(*(set(asdict(result.settings).items()) for result in results))
    settings = {key: value for key, value in asdict(results[0].settings).items() if (key, value) in shared}
    page = Page(
        "cLLM simulation",
        f"{traces_of(results)}. Step times from cost model {cost.name}: {cost.description}.",
        [*sections(results), Section("Settings", tables=[facts_table(settings)])],
        warnings if any(result.interrupted for result in results) else [],
    )
    return write_page(page, directory)


def sections(results: Sequence[Result]) -> Iterator[Section]:
    """The figures and all plots that have something to show."""
    if results[0].varied:
        keys = " and ".join(results[0].varied)
        same = "The same requests" if results[0].trace == results[-1].trace else "Requests"
        text = f"{same}, simulated with several values of {keys}."
        yield Section(f"What changes with {keys}", text, tables(results), _NOTES, list(_sweep_plots(results)))
        return
    several = len(results) > 1
    heading = "Policies side by side" if several else f"Policy {results[0].label}"
    text = "The same requests on the same amount of KV memory" + (", once with each policy." if several else ".")
    yield Section(heading, text, tables(results), _NOTES, list(_policy_plots(results)) if several else ())
    memory = list(_memory_plots(results))
    if memory:
        text = "What the KV memory held: tokens in use, memory taken but empty, and tokens cached for later requests."
        yield Section("Memory over time", text, plots=memory)


def _policy_plots(results: Sequence[Result]) -> Iterator[Plot]:
    for panel in _PANELS:
        if shown := panel.shown(results):
            yield _bars(panel, {result.label: result for result in shown})


def _bars(panel: Panel, results: dict[str, Result]) -> Plot:
    bars = [
        Bar(name, panel.value(result), short(panel.value(result)), _COLOURS[result.label])
        for name, result in results.items()
    ]
    size = (5.6, 1.0 + 0.3 * len(bars))
    return BarPlot(title=panel.title, caption=panel.caption, size=size, bars=bars, x_label=panel.unit)


def _memory_plots(results: Sequence[Result]) -> Iterator[Plot]:
    end = max((sample.seconds for result in results for sample in result.samples), default=0.0)
    unit, seconds = next(((unit, seconds) for unit, seconds in _UNITS if end > 2 * seconds), ("s", 1))
    for result in results:
        samples = result.samples
        if len(samples) > 1:
            yield AreaPlot(
                title=result.label,
                size=(5.6, 2.2),
                x=[sample.seconds / seconds for sample in samples],
                areas={
                    "used": [100 * sample.used for sample in samples],
                    "taken but empty": [100 * (sample.taken - sample.used) for sample in samples],
                    "cached": [100 * sample.cached for sample in samples],
                },
                x_label=f"simulated time, {unit}",
                y_label="% of memory",
                x_end=end / seconds,
                colour=_COLOURS[result.label],
            )


def _sweep_plots(results: Sequence[Result]) -> Iterator[Plot]:
    """Over the first varied setting, with a line for each policy and each value of the others; bars where its values
    are words."""
    key = next(iter(results[0].varied))
    by_name = lines(results)
    words = any(isinstance(result.varied[key], str) for result in results)
    several = any(result.settings.replicas > 1 for result in results)
    for panel in _CLUSTER_PANELS if several else _SWEEP_PANELS:
        shown = panel.shown(results)
        known = {name: [result for result in line if result in shown] for name, line in by_name.items()}
        if shown and words:
            suffixes = {name: f", {name}" if name and len(known) > 1 else "" for name in known}
            yield _bars(panel, {f"{each.varied[key]}{suffixes[name]}": each for name in known for each in known[name]})
        elif shown:
            yield _line_plot(panel, key, known)


def _line_plot(panel: Panel, key: str, by_name: dict[str, list[Result]]) -> Plot:
    series = [
        Series(name, [(float(each.varied[key]), panel.value(each)) for each in line], number, "both")
        for number, (name, line) in enumerate(by_name.items())
        if line
    ]
    marks = _marks(key, by_name) if panel.figure == knee_figure(key) else {}
    at_rate = f" Up to the knee it is at most {RISE:g} times that of the lowest rate."
    at_other = f" From the knee on it is within {100 * WITHIN:.0f} % of the best."
    values = [x for one in series for x, _ in one.points]
    return LinePlot(
        title=panel.title,
        caption=panel.caption + ((at_rate if key == RATE else at_other) if marks else ""),
        series=series,
        x_label=key,
        y_label=panel.unit,
        log_x=max(values) >= 8 * min(values) > 0,
        log_y=key == RATE and wide([y for one in series for _, y in one.points]),
        marks=marks,
    )


def _marks(key: str, by_name: dict[str, list[Result]]) -> dict[float, str]:
    marks: dict[float, str] = {}
    for name, line in by_name.items():
        found = knee(line, key)
        if found is not None:
            value = float(found.varied[key])
            marks[value] = f"{marks[value]}; {name}" if value in marks else f"knee: {name}"
    return marks
