"""Figures: what a workload measures, what it must reach, and whether it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from cllm_bench.response import TimedResponse
from cllm_bench.stats import Interval, ratio_interval
from cllm_bench.watch import Sample

Metrics = dict[str, float]

OURS = "ours"
"""The side that is measured: cLLM, or the server that was given in its place. Other sides are peers, by name."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What must be reached: a bound on our own value, or on how many times better than the peer it is."""

    on: Literal["value", "ratio"]
    bound: float
    only: Mapping[str, float] | None = None
    """Bounds beside certain peers instead; nothing is required beside others."""

    def against(self, peer: str) -> float | None:
        """How many times better than this peer we must be; None if nothing is required."""
        if self.on == "value":
            return None
        return self.bound if self.only is None else self.only.get(peer)


def own(bound: float) -> Limit:
    return Limit("value", bound)


def times_the_peer(bound: float) -> Limit:
    return Limit("ratio", bound)


@dataclass(frozen=True, slots=True)
class Figure:
    key: str
    """Its name in a run's metrics. `key_low` and `key_high` beside it are the ends of its interval."""
    label: str
    unit: str
    better: Literal["lower", "higher"] = "lower"
    limit: Limit | None = None
    format: str = ""
    """How its values are written, as in an f-string; otherwise three digits that matter."""
    compared: bool = True
    """False: a ratio of two such values means nothing."""

    def required(self, peer: str | None = None) -> str:
        """What must be reached, beside this peer or (None) by our own value; empty if nothing."""
        limit = self.limit
        if limit is None or (limit.on == "value") == (peer is not None):
            return ""
        if peer is not None:
            bound = limit.against(peer)
            return "" if bound is None else f">= {bound:g}x"
        return f"{'<=' if self.better == 'lower' else '>='} {limit.bound:,g} {self.unit}".rstrip()

    def ratio(self, ours: float, peer: float) -> float | None:
        """How many times better ours is: more than 1 is in our favour, whichever way is better."""
        if ours <= 0 or peer <= 0 or not self.compared:
            return None
        return peer / ours if self.better == "lower" else ours / peer


@dataclass(frozen=True, slots=True)
class Run:
    """One pass of a workload over one side."""

    side: str
    repeat: int
    metrics: Mapping[str, float]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Circumstances worth keeping: the server's settings, how busy the machine was before."""
    answers: Sequence[TimedResponse] = ()
    samples: Sequence[Sample] = ()
    partial: str | None = None
    """Why it ended before its work was done; its figures are then of what was done."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of several values, and how far they reach."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(median(values), min(values), max(values)) if values else None


@dataclass(frozen=True, slots=True)
class Verdict:
    met: bool
    """The whole interval is on the right side of the bound."""
    clear: bool
    """False where the bound is inside the interval: the next run might say otherwise."""

    def __str__(self) -> str:
        return "met" if self.met else "not met" if self.clear else "uncertain"


@dataclass(frozen=True, slots=True)
class PeerFigure:
    """A peer's value of a figure, and how many times better ours is."""

    value: Spread | None
    ratio: Interval | None


@dataclass(frozen=True, slots=True)
class Row:
    figure: Figure
    ours: Spread | None
    peers: Mapping[str, PeerFigure]

    def verdict(self, peer: str | None = None) -> Verdict | None:
        """Beside this peer or (None) on our own value; None where nothing is required or it was not measured."""
        limit = self.figure.limit
        if limit is None or (limit.on == "value") == (peer is not None):
            return None
        bound = limit.bound if peer is None else limit.against(peer)
        measured = self._own if peer is None else self.peers[peer].ratio
        if bound is None or measured is None:
            return None
        if peer is None and self.figure.better == "lower":
            met, missed = measured.high <= bound, measured.low > bound
        else:
            met, missed = measured.low >= bound, measured.high < bound
        return Verdict(met, met or missed)

    @property
    def _own(self) -> Interval | None:
        return Interval(self.ours.median, self.ours.low, self.ours.high) if self.ours else None


def sides(runs: Iterable[Run]) -> list[str]:
    """The sides that were measured: ours first, then the peers."""
    found = dict.fromkeys(run.side for run in runs)
    return [OURS, *(side for side in found if side != OURS)]


def summarise(figures: Sequence[Figure], runs: Sequence[Run]) -> list[Row]:
    """Medians over the repeats. Ratios are taken within each repeat, where all sides saw the same machine.

    A pass that was broken off counts only where its side has no other, and never in a ratio.
    """
    return [_row(figure, runs) for figure in figures]


def _row(figure: Figure, runs: Sequence[Run]) -> Row:
    ours = _whole(figure, OURS, runs)
    peers = {}
    for side in sides(runs)[1:]:
        theirs = _whole(figure, side, runs)
        ratios = [figure.ratio(ours[repeat], theirs[repeat]) for repeat in sorted(ours.keys() & theirs.keys())]
        known = [ratio for ratio in ratios if ratio is not None]
        peers[side] = PeerFigure(_spread(figure, side, runs), ratio_interval(known) if known else None)
    return Row(figure, _spread(figure, OURS, runs), peers)


def _whole(figure: Figure, side: str, runs: Sequence[Run]) -> dict[int, float]:
    """The values of passes that came to their end, by repeat."""
    return {
        run.repeat: run.metrics[figure.key]
        for run in runs
        if run.side == side and run.partial is None and figure.key in run.metrics
    }


def _spread(figure: Figure, side: str, runs: Sequence[Run]) -> Spread | None:
    measured = [run for run in runs if run.side == side and figure.key in run.metrics]
    counted = [run.metrics for run in measured if run.partial is None] or [run.metrics for run in measured]
    low, high = f"{figure.key}_low", f"{figure.key}_high"
    if counted and all(low in metrics and high in metrics for metrics in counted):
        return Spread(*(median(metrics[key] for metrics in counted) for key in (figure.key, low, high)))
    return Spread.of([metrics[figure.key] for metrics in counted])
