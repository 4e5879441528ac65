"""Scaling with threads as a picture. matplotlib is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cllm.bench.http import BenchError
from cllm.bench.kernels.scaling_report import Scaling
from cllm.bench.kernels.works import SCALING_WORKS

FORMATS = (".png", ".svg", ".pdf")
_COLOURS = ("#1f5fa8", "#4b9b6e", "#c9973f", "#8456a8", "#9c6b30", "#7a7a7a")
_LABELS = {work.key: work.label.removeprefix("decode, ") for work in SCALING_WORKS}

Axes = Any
"""matplotlib's; it need not be installed."""


def check(file: Path) -> None:
    """Before minutes are spent: can this be drawn at all?"""
    if file.suffix not in FORMATS:
        raise BenchError(f"{file}: a plot ends in {', '.join(FORMATS)}")
    _pyplot()


def draw(results: Sequence[Scaling], file: Path) -> None:
    """A row for each model: speeds beside the best, and shares of the machine's limits."""
    check(file)
    size = (11, 0.4 + 3.4 * len(results))
    figure, grid = _pyplot().subplots(len(results), 2, figsize=size, layout="constrained", squeeze=False)
    for (speeds, shares), found in zip(grid, results, strict=True):
        _lines(speeds, found, found.of_best, f"{found.name}: tokens/s beside the best number of threads")
        _lines(shares, found, found.share, "share of the limit: int8 with scales (prefill), memory (1 stream)")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=110)
    except OSError as error:
        raise BenchError(f"cannot write {file}: {error.strerror or error}") from error
    _pyplot().close(figure)


def _lines(axes: Axes, found: Scaling, value: Any, title: str) -> None:
    counts = sorted(found.speeds)
    for colour, work in zip(_COLOURS, found.works, strict=False):
        points = [(threads, height) for threads in counts if (height := value(threads, work)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=_LABELS[work])
    axes.axvline(found.default, color="#999999", linestyle=":", linewidth=1)
    place = {"transform": axes.get_xaxis_transform(), "rotation": 90, "va": "bottom", "ha": "right", "fontsize": 8}
    axes.text(found.default, 0.02, f"default {found.default}", color="#777777", **place)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts], fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(0, max(1.05, axes.get_ylim()[1]))
    axes.set_xlabel("threads", fontsize=9)
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError("plots need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
