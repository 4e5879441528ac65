"""Plots by matplotlib: SVG for a page, in colours that follow the reader's light or dark theme, or files."""

from __future__ import annotations

import io
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from cllm.errors import CLLMError
from cllm_bench.pages.extras import check_plot

LIGHT = {
    "paper": "#ffffff", "card": "#f7f8fa", "ink": "#1b2330", "soft": "#5b6675", "rule": "#dfe3e8", "grid": "#e6e9ee",
    "good": "#12805c", "bad": "#c0362c", "doubt": "#9a6700",
    "c0": "#2160d8", "c1": "#d5670a", "c2": "#7a3fd0", "c3": "#0e8a6d", "c4": "#b3256e", "c5": "#6b7280",
    "c6": "#8a6d1f",
}  # fmt: skip
DARK = {
    "paper": "#12161c", "card": "#1a2029", "ink": "#e6eaf0", "soft": "#9aa6b5", "rule": "#2d3541", "grid": "#29313c",
    "good": "#4cc38a", "bad": "#f2796f", "doubt": "#e0b040",
    "c0": "#6ea8ff", "c1": "#f6a04d", "c2": "#b794f6", "c3": "#4fd1b0", "c4": "#f387bd", "c5": "#a3adba",
    "c6": "#d9bd6a",
}  # fmt: skip
"""The themes of the page. Plots are drawn in light colours; in SVG they become the page's variables."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cllm",
    "font.size": 9,
    "text.color": LIGHT["ink"],
    "axes.labelcolor": LIGHT["soft"],
    "axes.edgecolor": LIGHT["soft"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "grid.color": LIGHT["grid"],
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "ytick.left": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.markerscale": 1.5,
    "legend.labelcolor": LIGHT["soft"],
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}
_SIZE = (5.6, 3.0)
_FEW_TICKS = 8

Axes = Any
Point = tuple[float, float]
Style = Literal["line", "dots", "both"]


@dataclass(frozen=True, kw_only=True)
class Plot(ABC):
    """One plot on axes of its own."""

    title: str
    caption: str = ""
    """A sentence that says what it shows."""
    size: tuple[float, float] = _SIZE
    """In inches."""

    @abstractmethod
    def draw(self, axes: Axes, legend: Mapping[str, Any]) -> None:
        """`legend` says where a legend goes."""

    @cached_property
    def svg(self) -> str:
        figure = _matplotlib().figure.Figure(figsize=self.size, layout="constrained", facecolor="none")
        self.draw(figure.add_subplot(), {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderpad": 0})
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        text = stream.getvalue()
        variables = {colour: f"var(--{name})" for name, colour in LIGHT.items()}
        return re.sub(r"#[0-9a-f]{6}\b", lambda found: variables.get(found[0], found[0]), text[text.index("<svg") :])


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: int = 0
    style: Style = "line"


@dataclass(frozen=True, kw_only=True)
class LinePlot(Plot):
    """Lines or dots. A linear y axis starts at zero, so that a small change looks small."""

    series: Sequence[Series]
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    marks: Mapping[float, str] = field(default_factory=dict)
    """Texts at values of x."""

    def draw(self, axes: Axes, legend: Mapping[str, Any]) -> None:
        for one in self.series:
            look: dict[str, Any] = {"color": _colour(one.colour), "label": one.name}
            if one.style == "dots":
                look |= {"linestyle": "none", "alpha": 0.75}
            if one.style != "line" or len(one.points) == 1:
                look |= {"marker": "o"} | ({"markersize": 2.5, "markeredgewidth": 0} if len(one.points) > 60 else {})
            axes.plot(*zip(*one.points, strict=True), **look)
        xs, ys = ([point[axis] for one in self.series for point in one.points] for axis in (0, 1))
        _scale(axes, "x", xs, self.log_x, few=True)
        _scale(axes, "y", ys, self.log_y)
        if axes.get_yscale() == "linear":
            axes.set_ylim(min(0.0, min(ys) * 1.05), max(ys) * 1.05 or 1.0)
        for x, text in self.marks.items():
            axes.axvline(x, color=LIGHT["soft"], linestyle=":", linewidth=1)
            look = {"color": LIGHT["soft"], "fontsize": 8, "rotation": 90, "ha": "right"}
            axes.annotate(text, (x, 0), (-3, 4), axes.get_xaxis_transform(), "offset points", **look)
        axes.set(xlabel=self.x_label, ylabel=self.y_label)
        _add_legend(axes, legend)


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    text: str
    """What stands beside it."""
    colour: int = 0
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class BarPlot(Plot):
    """Horizontal bars from zero; or, beside a reference on a logarithmic axis, dots with their intervals."""

    bars: Sequence[Bar]
    x_label: str
    reference: float | None = None
    names: Sequence[tuple[str, int]] = ()
    """The legend: names and colours."""

    def draw(self, axes: Axes, legend: Mapping[str, Any]) -> None:
        rows = range(len(self.bars))
        if self.reference is None:
            values, colours = [bar.value for bar in self.bars], [_colour(bar.colour) for bar in self.bars]
            drawn = axes.barh(rows, values, color=colours, height=0.7)
            axes.bar_label(drawn, labels=[bar.text for bar in self.bars], padding=3, fontsize=8)
            axes.margins(x=0.18)
            _scale(axes, "x", values)
        else:
            for row, bar in zip(rows, self.bars, strict=True):
                axes.plot(bar.interval or (bar.value,) * 2, (row, row), color=_colour(bar.colour), linewidth=2)
                axes.plot(bar.value, row, marker="o", markersize=6, color=_colour(bar.colour))
                place = {"xycoords": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
                axes.annotate(bar.text, (1.02, row), annotation_clip=False, **place)
            axes.axvline(self.reference, color=LIGHT["soft"], linestyle="--", linewidth=1)
            ends = [end for bar in self.bars for end in bar.interval or (bar.value,)]
            ends = [min(*ends, self.reference) / 1.2, max(*ends, self.reference) * 1.2]
            axes.set_xlim(ends)
            _scale(axes, "x", ends, log=True)
        axes.set_yticks(rows, [bar.label for bar in self.bars], color=LIGHT["ink"])
        axes.set_ylim(len(self.bars) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        axes.set_xlabel(self.x_label)
        for name, colour in self.names:
            axes.plot([], [], marker="o", color=_colour(colour), label=name)
        _add_legend(axes, legend)


@dataclass(frozen=True, kw_only=True)
class AreaPlot(Plot):
    """Shares of a whole over x, one on top of the other."""

    x: Sequence[float]
    areas: Mapping[str, Sequence[float]]
    x_label: str
    y_label: str
    x_end: float
    colour: int = 0

    def draw(self, axes: Axes, legend: Mapping[str, Any]) -> None:
        colours = (_colour(self.colour), (LIGHT["bad"], 0.4), (LIGHT["soft"], 0.3))
        axes.stackplot(self.x, *self.areas.values(), labels=list(self.areas), colors=colours, linewidth=0)
        axes.set(xlim=(0, self.x_end), ylim=(0, 100), xlabel=self.x_label, ylabel=self.y_label)
        _add_legend(axes, {**legend, "frameon": True, "facecolor": LIGHT["paper"], "edgecolor": "none"})


def save_plots(plots: Sequence[Plot], file: Path, heading: str = "") -> Path:
    """All of them in one file, side by side."""
    check_plot(file)
    if not plots:
        raise CLLMError(f"--plot {file}: there is nothing to draw")
    columns = min(len(plots), 2 if len(plots) < 6 else 3)
    rows = -(-len(plots) // columns)
    size = ((4.2 if columns > 2 else 5.6) * columns, 0.3 + 3.0 * rows)
    figure = _matplotlib().figure.Figure(figsize=size, layout="constrained")
    for number, plot in enumerate(plots, 1):
        axes = figure.add_subplot(rows, columns, number)
        plot.draw(axes, {"loc": "best"})
        axes.set_title(plot.title)
    figure.suptitle(heading, fontsize=10, x=0.01, ha="left")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=130)
    except OSError as error:
        raise CLLMError(f"cannot write {file}: {error.strerror or error}") from error
    return file


def wide(values: Sequence[float]) -> bool:
    """Whether they are so far apart that a linear axis would hide most of them."""
    above_zero = [value for value in values if value > 0]
    return bool(above_zero) and max(above_zero) > 8 * min(above_zero)


def tick_text(value: float, _position: int = 0) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value:,.6g}"


def _scale(axes: Axes, name: str, values: Sequence[float], log: bool = False, *, few: bool = False) -> None:
    """Ticks at round numbers; with `few`, at whole values where there are few, such as numbers of clients."""
    ticker = _matplotlib().ticker
    axis = getattr(axes, f"{name}axis")
    locator = ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
    if log and min(values) > 0:
        axes.set(**{f"{name}scale": "log"})
        axis.set_minor_locator(ticker.NullLocator())
        times = max(values) / min(values)
        if times >= 8:
            locator = ticker.LogLocator(subs=(1, 2, 5) if times <= 1000 else (1,))
    if few and len(set(values)) <= _FEW_TICKS and all(value == round(value) for value in values):
        locator = ticker.FixedLocator(sorted(set(values)))
    axis.set_major_locator(locator)
    axis.set_major_formatter(tick_text)


def _add_legend(axes: Axes, place: Mapping[str, Any]) -> None:
    longest = max(map(len, axes.get_legend_handles_labels()[1]), default=0)
    if longest:
        columns = 1 if "bbox_to_anchor" not in place else 3 if longest <= 18 else 2 if longest <= 30 else 1
        axes.legend(**place, ncols=columns)


def _colour(number: int) -> str:
    return LIGHT[f"c{number % 7}"]


@lru_cache(maxsize=1)
def _matplotlib() -> Any:
    """matplotlib, with our style."""
    import matplotlib
    import matplotlib.figure
    import matplotlib.ticker

    matplotlib.rcParams.update(_STYLE)
    return matplotlib
