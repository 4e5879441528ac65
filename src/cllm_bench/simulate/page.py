"""The page of a sweep: its table, and its figures drawn over the first number that was varied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cllm_bench.pages.page import Page, Section, Table, facts_table, write_page
from cllm_bench.pages.plots import Plot, Point, Series
from cllm_bench.simulate.cost import CostModel
from cllm_bench.simulate.report import shown_columns, shown_varied
from cllm_bench.simulate.results import Result, traces_of

BASE = "lru"
"""The policy to which others are compared."""

FIGURES = [
    (
        "Computing saved",
        "What computing what was found of prompts would have taken.",
        "hours",
        "saved_s",
        3600,
    ),
    ("Cache hits", "The share of prompt tokens that was found.", "%", "hit_rate", 0.01),
    ("First token, P95", "How long 95 % of the requests waited at most.", "seconds", "ttft_p95_s", 1),
]


def write_results(results: Sequence[Result], cost: CostModel, directory: Path) -> Path:
    columns = shown_columns(results)
    headings = [*results[0].varied, *(label.strip() for label, _ in columns)]
    rows = [[*shown_varied(result), *(show(result.figures) for _, show in columns)] for result in results]
    facts = {"cost model": f"{cost.name}: {cost.description}", **{key: str(v) for key, v in _settings(results[0])}}
    sections = [
        Section("Results", "", [Table(rows, headings)], plots=list(plots_of(results))),
        Section("Settings", "What was not varied.", [facts_table(facts)]),
    ]
    return write_page(Page("cLLM simulation", traces_of(results), sections), directory)


def _settings(result: Result) -> Iterator[tuple[str, object]]:
    for key, value in result.to_json()["settings"].items():
        if key.replace("_", "-") not in result.varied:
            yield key, value


def plots_of(results: Sequence[Result]) -> Iterator[Plot]:
    x = next((key for key, value in results[0].varied.items() if not isinstance(value, str)), None)
    if x is None or len({result.varied[x] for result in results}) < 2:
        return
    for title, caption, unit, name, scale in FIGURES:
        series = _series(results, x, lambda result, name=name, scale=scale: result.figures[name] / scale)  # type: ignore[misc]
        yield Plot(title=title, caption=caption, series=series, x_label=x, y_label=unit)
    saved = {_place(result): result.figures["saved_s"] for result in results if result.settings.eviction == BASE}
    if saved and len(saved) < len(results):
        series = _series(results, x, lambda result: result.figures["saved_s"] / saved[_place(result)])
        caption = f"How many times what {BASE} saves of the same requests in the same memory."
        yield Plot(
            title=f"Computing saved / by {BASE}", caption=caption, series=series, x_label=x, y_label="times", near=True
        )


def _place(result: Result) -> tuple[object, ...]:
    return tuple(value for key, value in result.varied.items() if key != "eviction")


def _series(results: Sequence[Result], x: str, figure: Callable[[Result], float]) -> list[Series]:
    """One for every combination of the other things that were varied."""
    lines: dict[str, list[Point]] = {}
    for result in results:
        name = " ".join(str(value) for key, value in result.varied.items() if key != x) or result.trace
        lines.setdefault(name, []).append((float(result.varied[x]), figure(result)))
    return [Series(name, points, colour) for colour, (name, points) in enumerate(lines.items())]
