"""Plots as SVG text: axes with units, lines, dots, intervals. Colours are the page's, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 80, 16, 14, 46
COLOURS = 6
"""Classes s0, s1 … that the page's style gives colours."""

_FEW = 8

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: int
    look: Literal["line", "dots", "both"] = "line"


@dataclass(frozen=True, slots=True)
class Bar:
    """An estimate with its interval, on a line of its own."""

    label: str
    estimate: float
    low: float
    high: float
    colour: int
    text: str


class Axis:
    """From values to pixels, with ticks at round numbers."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        self.log = log and low > 0
        if high <= low:
            low, high = (low / 2, high * 2) if self.log else (low - 0.5, high + 0.5)
        self.low, self.high = low, high
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return self._start + (value - low) / (high - low) * (self._end - self._start)

    def ticks(self, about: int) -> list[float]:
        if not self.log:
            return linear_ticks(self.low, self.high, about)
        ticks = log_ticks(self.low, self.high)
        return ticks if len(ticks) >= 2 else linear_ticks(self.low, self.high, about)


def linear_ticks(low: float, high: float, about: int) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten within the range."""
    rough = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def tick_text(value: float) -> str:
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value:,.0f}" if magnitude >= 1000 else f"{value:.3g}"


def line_plot(series: Sequence[Series], *, x_label: str, y_label: str, log_x: bool = False, log_y: bool = False) -> str:
    """Lines or dots over two axes. A linear y axis starts at zero, so that a small change looks small."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    if log_y and min(ys) > 0:
        low, high = min(ys) / 1.15, max(ys) * 1.15
    else:
        low, high = min(0.0, min(ys) * 1.05), max(ys) * 1.05 or 1.0
    x_axis = Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, log=log_x)
    y_axis = Axis(low, high, HEIGHT - BOTTOM, TOP, log=log_y)
    parts = [*_frame(x_axis, y_axis, _x_ticks(xs, x_axis), x_label, y_label)]
    for one in series:
        parts += _draw(one, x_axis, y_axis)
    return _svg(WIDTH, HEIGHT, parts, f"{y_label} over {x_label}")


def bar_plot(bars: Sequence[Bar], *, x_label: str, reference: float) -> str:
    """Estimates with their intervals, one below the other, beside a line at `reference`; the axis is logarithmic."""
    left, row, width, texts = 250, 26, 860, 150
    height = TOP + row * len(bars) + BOTTOM
    ends = [end for bar in bars for end in (bar.low, bar.high)] + [reference]
    axis = Axis(min(ends) / 1.25, max(ends) * 1.25, left, width - texts, log=True)
    bottom = height - BOTTOM
    parts = [_text(axis(tick), bottom + 18, f"{tick_text(tick)}x", "middle") for tick in axis.ticks(5)]
    parts += [_line(axis(tick), TOP, axis(tick), bottom, "grid") for tick in axis.ticks(5)]
    parts.append(_line(axis(reference), TOP, axis(reference), bottom, "reference"))
    parts.append(_text((left + width - texts) / 2, height - 8, x_label, "middle", "label"))
    for number, bar in enumerate(bars):
        y = TOP + row * (number + 0.5)
        parts.append(_text(left - 10, y + 4, bar.label, "end", "name"))
        parts.append(_line(axis(bar.low), y, axis(bar.high), y, f"whisker s{bar.colour % COLOURS}"))
        parts.append(_dot(axis(bar.estimate), y, bar.colour, 5, f"{bar.label}: {bar.text}"))
        parts.append(_text(width - texts + 16, y + 4, bar.text, "start", "value"))
    return _svg(width, height, parts, x_label)


def _x_ticks(xs: Sequence[float], axis: Axis) -> list[float]:
    """The values themselves where there are few of them, such as numbers of clients."""
    distinct = sorted(set(xs))
    return distinct if len(distinct) <= _FEW else axis.ticks(7)


def _frame(x_axis: Axis, y_axis: Axis, x_ticks: Sequence[float], x_label: str, y_label: str) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y_axis.ticks(5):
        parts.append(_line(LEFT, y_axis(tick), right, y_axis(tick), "grid"))
        parts.append(_text(LEFT - 8, y_axis(tick) + 4, tick_text(tick), "end"))
    for tick in x_ticks:
        parts.append(_line(x_axis(tick), bottom, x_axis(tick), bottom + 4, "axis"))
        parts.append(_text(x_axis(tick), bottom + 18, tick_text(tick), "middle"))
    parts.append(_line(LEFT, bottom, right, bottom, "axis"))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 8, x_label, "middle", "label"))
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text class="label" text-anchor="middle" transform="translate(16 {middle:.0f}) rotate(-90)">'
        f"{escape(y_label)}</text>"
    )
    return parts


def _draw(series: Series, x_axis: Axis, y_axis: Axis) -> list[str]:
    points = [(x_axis(x), y_axis(y)) for x, y in series.points]
    parts = []
    if series.look != "dots":
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line s{series.colour % COLOURS}" points="{path}"/>')
    if series.look != "line" or len(points) == 1:
        small = len(points) > 60
        for (x, y), (value_x, value_y) in zip(points, series.points, strict=True):
            hint = f"{series.name}: {tick_text(value_y)} at {tick_text(value_x)}"
            parts.append(_dot(x, y, series.colour, 2 if small else 3.5, hint))
    return parts


def _svg(width: float, height: float, parts: Sequence[str], what: str) -> str:
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(what)}">'
    return head + "".join(parts) + "</svg>"


def _line(x1: float, y1: float, x2: float, y2: float, look: str) -> str:
    return f'<line class="{look}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _dot(x: float, y: float, colour: int, radius: float, hint: str) -> str:
    look = f"dot s{colour % COLOURS}"
    return f'<circle class="{look}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"><title>{escape(hint)}</title></circle>'


def _text(x: float, y: float, text: str, anchor: str, look: str = "tick") -> str:
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
