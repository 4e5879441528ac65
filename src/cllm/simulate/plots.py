"""Pictures of results. matplotlib is imported when one is asked for."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cllm.errors import ConfigError
from cllm.simulate.report import knee, short
from cllm.simulate.results import Result
from cllm.simulate.settings import POLICIES

Figure = Any
Axes = Any
"""matplotlib's; it need not be installed."""

FORMATS = (".svg", ".png", ".pdf")
_PALETTE = ("#9c6b30", "#c9973f", "#7a7a7a", "#5b9bd5", "#1f5fa8", "#4b9b6e", "#8456a8")
COLOURS = dict(zip(POLICIES, _PALETTE, strict=True))

Panel = tuple[str, str, float]
"""A figure, its title and what it is multiplied by."""

PANELS: tuple[Panel, ...] = (
    ("answer_tokens_per_s", "answer tokens/s", 1.0),
    ("ttft_p95_s", "first token, P95 [s]", 1.0),
    ("total_p95_s", "whole request, P95 [s]", 1.0),
    ("hit_rate", "prompt tokens from the cache [%]", 100.0),
    ("waste", "memory taken but empty [%]", 100.0),
)
POLICY_PANELS = (*PANELS, ("moved_bytes", "moved [GiB]", 1 / 2**30))
SWEEP_PANELS = (*PANELS, ("token_gap_p99_s", "between tokens, P99 [ms]", 1000.0))


def check_plot_file(file: Path) -> None:
    """Before hours are spent: can this be written at all?"""
    if file.suffix not in FORMATS:
        raise ConfigError(f"{file}: a plot ends in {', '.join(FORMATS)}")
    pyplot()


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(results: Sequence[Result]) -> list[Figure]:
    """What there is to see: a sweep, or policies side by side and the memory over time."""
    if results[0].varied:
        return [draw_sweep(results)]
    return [draw_policies(results), draw_memory(results)]


def save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def as_svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def draw_policies(results: Sequence[Result]) -> Figure:
    """One panel per figure, one bar per policy."""
    figure, grid = pyplot().subplots(2, 3, figsize=(12, 5.4), layout="constrained")
    labels = [result.label for result in results]
    for axes, (name, title, scale) in zip(grid.flat, POLICY_PANELS, strict=True):
        values = [0.0 if math.isnan(r.figures[name]) else r.figures[name] * scale for r in results]
        bars = axes.barh(labels, values, color=[COLOURS[label] for label in labels])
        axes.bar_label(bars, labels=[short(value) for value in values], fontsize=8, padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.18)
        _style(axes, title)
    figure.suptitle(f"{results[0].trace}; cost model {results[0].cost}", fontsize=10, x=0.01, ha="left")
    return figure


def draw_memory(results: Sequence[Result]) -> Figure:
    """What the memory held over time: used, taken but empty, cached."""
    figure, grid = pyplot().subplots(
        len(results), 1, figsize=(10, 0.8 + 1.2 * len(results)), layout="constrained", squeeze=False, sharex=True
    )
    longest = max((sample.seconds for result in results for sample in result.samples), default=0.0)
    unit, seconds = ("h", 3600) if longest > 7200 else ("min", 60) if longest > 120 else ("s", 1)
    for axes, result in zip(grid.flat, results, strict=True):
        times = [sample.seconds / seconds for sample in result.samples]
        used = [100 * sample.used for sample in result.samples]
        empty = [100 * (sample.taken - sample.used) for sample in result.samples]
        cached = [100 * sample.cached for sample in result.samples]
        colours = (COLOURS[result.label], "#e0b0a8", "#d5dde6")
        axes.stackplot(times, used, empty, cached, colors=colours, labels=("used", "taken but empty", "cached"))
        axes.set_ylim(0, 100)
        axes.set_ylabel("memory [%]", fontsize=8)
        _style(axes, result.label)
    grid[0, 0].legend(fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    grid[-1, 0].set_xlabel(f"simulated time [{unit}]", fontsize=9)
    return figure


def draw_sweep(results: Sequence[Result]) -> Figure:
    """Figures against the first varied setting, one line per policy and further settings; the knee is marked."""
    key, *others = results[0].varied
    lines: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        further = [f"{other}={result.varied[other]}" for other in others]
        policy = [] if key == "policy" else [result.label]
        lines.setdefault((*policy, *further), []).append(result)
    by_policy = key != "policy" and len(lines) == len({labels[0] for labels in lines})
    figure, grid = pyplot().subplots(2, 3, figsize=(12, 6), layout="constrained")
    for axes, (name, title, scale) in zip(grid.flat, SWEEP_PANELS, strict=True):
        for number, (labels, line) in enumerate(lines.items()):
            colour = COLOURS[labels[0]] if by_policy else f"C{number}"
            _draw_line(axes, key, line, name, scale, colour, ", ".join(labels))
        _scale_axis(axes, key, results)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        _style(axes, title)
    grid[0, 0].legend(fontsize=8, frameon=False)
    figure.suptitle(f"{results[0].trace}; cost model {results[0].cost}", fontsize=10, x=0.01, ha="left")
    return figure


def _draw_line(axes: Axes, key: str, line: Sequence[Result], name: str, scale: float, colour: str, label: str) -> None:
    values = [result.varied[key] for result in line]
    heights = [result.figures[name] * scale for result in line]
    axes.plot(values, heights, marker="o", markersize=4, color=colour, label=label)
    if name == "total_p95_s" and (found := knee(line, key)) is not None:
        value = found.varied[key]
        axes.axvline(value, color=colour, linestyle=":", linewidth=1)
        place = {"transform": axes.get_xaxis_transform(), "rotation": 90, "va": "top", "ha": "right", "fontsize": 8}
        axes.text(value, 0.98, f"knee {value:,}", color=colour, **place)


def _scale_axis(axes: Axes, key: str, results: Sequence[Result]) -> None:
    axes.set_xlabel(key, fontsize=9)
    values = [result.varied[key] for result in results]
    numbers = [float(value) for value in values if isinstance(value, (int, float))]
    if len(numbers) == len(values) and min(numbers) > 0 and max(numbers) / min(numbers) >= 8:
        axes.set_xscale("log", base=10 if max(numbers) / min(numbers) > 1000 else 2)
        axes.set_xticks(sorted(set(numbers)), [f"{number:g}" for number in sorted(set(numbers))], fontsize=8)
        axes.minorticks_off()
