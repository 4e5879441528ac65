"""Line plots by matplotlib, as SVG in colours that follow the reader's light or dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

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
"""The themes of the page. Plots are drawn in light colours, which become the page's variables."""

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
    "grid.color": LIGHT["grid"],
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "ytick.left": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.markerscale": 1.5,
    "legend.labelcolor": LIGHT["soft"],
    "lines.linewidth": 1.6,
}
_SIZE = (5.6, 3.0)
"""In inches."""

Axes = Any
Point = tuple[float, float]
Style = Literal["line", "dots"]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: int = 0
    style: Style = "line"


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Lines or dots. A linear y axis starts at zero, so that a small change looks small."""

    title: str
    caption: str
    """A sentence that says what it shows."""
    series: Sequence[Series]
    x_label: str
    y_label: str
    log_y: bool = False
    near: bool = False
    """Whether the y axis begins near the lowest value, as for ratios about 1."""

    @cached_property
    def svg(self) -> str:
        figure = _matplotlib().figure.Figure(figsize=_SIZE, layout="constrained", facecolor="none")
        self.draw(figure.add_subplot())
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        text = stream.getvalue()
        variables = {colour: f"var(--{name})" for name, colour in LIGHT.items()}
        return re.sub(r"#[0-9a-f]{6}\b", lambda found: variables.get(found[0], found[0]), text[text.index("<svg") :])

    def draw(self, axes: Axes) -> None:
        for one in self.series:
            look: dict[str, Any] = {"color": LIGHT[f"c{one.colour % 7}"], "label": one.name}
            if one.style == "dots":
                look |= {"linestyle": "none", "alpha": 0.75, "marker": "o", "markeredgewidth": 0}
                look["markersize"] = 2.5 if len(one.points) > 60 else 4
            axes.plot(*zip(*one.points, strict=True), **look)
        ys = [y for one in self.series for _, y in one.points]
        _scale(axes, "x")
        _scale(axes, "y", log=self.log_y and min(ys) > 0, times=max(ys) / min(ys) if min(ys) > 0 else 1)
        if axes.get_yscale() == "linear" and not self.near:
            axes.set_ylim(min(0.0, min(ys) * 1.05), max(ys) * 1.05 or 1.0)
        axes.set(xlabel=self.x_label, ylabel=self.y_label)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderpad=0, ncols=2)


def wide(values: Sequence[float]) -> bool:
    """Whether they are so far apart that a linear axis would hide most of them."""
    above_zero = [value for value in values if value > 0]
    return bool(above_zero) and max(above_zero) > 8 * min(above_zero)


def tick_text(value: float, _position: int = 0) -> str:
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value:,.6g}"


def _scale(axes: Axes, name: str, *, log: bool = False, times: float = 1) -> None:
    """Ticks at round numbers."""
    ticker = _matplotlib().ticker
    axis = getattr(axes, f"{name}axis")
    locator = ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
    if log:
        axes.set(**{f"{name}scale": "log"})
        axis.set_minor_locator(ticker.NullLocator())
        if times >= 8:
            locator = ticker.LogLocator(subs=(1, 2, 5) if times <= 1000 else (1,))
    axis.set_major_locator(locator)
    axis.set_major_formatter(tick_text)


@lru_cache(maxsize=1)
def _matplotlib() -> Any:
    """matplotlib, with our style."""
    import matplotlib
    import matplotlib.figure
    import matplotlib.ticker

    matplotlib.rcParams.update(_STYLE)
    return matplotlib
