"""Figures: what a workload measures, what it must reach, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

Side = Literal["ours", "peer"]


@dataclass(frozen=True, slots=True)
class Limit:
    """What must be reached: a bound on our own value, or on how many times better than the peer it is."""

    on: Literal["value", "ratio"]
    bound: float


def own(bound: float) -> Limit:
    return Limit("value", bound)


def times_the_peer(bound: float) -> Limit:
    return Limit("ratio", bound)


@dataclass(frozen=True, slots=True)
class Figure:
    key: str
    """Its name in a run's metrics."""
    label: str
    unit: str
    better: Literal["lower", "higher"] = "lower"
    limit: Limit | None = None

    @property
    def required(self) -> str:
        if self.limit is None:
            return ""
        if self.limit.on == "ratio":
            return f">= {self.limit.bound:g}x"
        return f"{'<=' if self.better == 'lower' else '>='} {self.limit.bound:,g} {self.unit}".rstrip()

    def ratio(self, ours: float, peer: float) -> float | None:
        """How many times better ours is: more than 1 is in our favour, whichever way is better."""
        if ours <= 0 or peer <= 0:
            return None
        return peer / ours if self.better == "lower" else ours / peer


@dataclass(frozen=True, slots=True)
class Run:
    """One pass of a workload over one side."""

    side: Side
    repeat: int
    metrics: Mapping[str, float]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Circumstances worth keeping: the server's settings, how busy the machine was before."""


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(median(values), min(values), max(values)) if values else None


@dataclass(frozen=True, slots=True)
class Row:
    figure: Figure
    ours: Spread | None
    peer: Spread | None
    ratio: Spread | None

    @property
    def met(self) -> bool | None:
        """None where nothing is required, or what it needs was not measured."""
        limit = self.figure.limit
        if limit is None:
            return None
        measured = self.ratio if limit.on == "ratio" else self.ours
        if measured is None:
            return None
        if limit.on == "value" and self.figure.better == "lower":
            return measured.median <= limit.bound
        return measured.median >= limit.bound


def summarise(figures: Sequence[Figure], runs: Sequence[Run]) -> list[Row]:
    """Medians over the repeats. Ratios are taken within each repeat, where both sides saw the same machine."""
    rows = []
    for figure in figures:
        values: dict[Side, dict[int, float]] = {"ours": {}, "peer": {}}
        for run in runs:
            if figure.key in run.metrics:
                values[run.side][run.repeat] = run.metrics[figure.key]
        ours, peer = values["ours"], values["peer"]
        ratios = [figure.ratio(ours[repeat], peer[repeat]) for repeat in ours.keys() & peer.keys()]
        rows.append(
            Row(
                figure,
                Spread.of(list(ours.values())),
                Spread.of(list(peer.values())),
                Spread.of([ratio for ratio in ratios if ratio is not None]),
            )
        )
    return rows
