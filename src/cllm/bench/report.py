"""The table on the screen and the file for later."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cllm.bench.figures import Figure, Row, Run, Side, Spread, summarise

_BUSY_PERCENT = 10.0
"""A machine busier than this before a pass makes its figures doubtful."""


@dataclass(frozen=True)
class Result:
    """All that one workload gave."""

    name: str
    title: str
    driven: str
    """Whose figures stand in the first column: cLLM, or the address that was driven in its place."""
    peer: str | None
    figures: Sequence[Figure]
    runs: Sequence[Run]

    @property
    def rows(self) -> list[Row]:
        return summarise(self.figures, self.runs)

    @property
    def notes(self) -> list[str]:
        """What a reader must know to judge the figures."""
        notes = []
        settings = {run.facts["settings"] for run in self.runs if "settings" in run.facts}
        if settings:
            notes.append(f"{self.peer}: {'; '.join(sorted(settings))}")
        if lacking := self._peer_lacks():
            notes.append(f"{self.peer} was built without {', '.join(lacking)}, which cLLM's llama.cpp uses")
        busiest = max((run.facts.get("busy_percent_before", 0.0) for run in self.runs), default=0.0)
        if busiest > _BUSY_PERCENT:
            notes.append(f"the machine was up to {busiest:.0f} % busy before a pass: figures are doubtful")
        return notes

    def _peer_lacks(self) -> list[str]:
        """CPU features that only our build of llama.cpp has: part of any difference comes from them."""
        features: dict[Side, set[str]] = {"ours": set(), "peer": set()}
        for run in self.runs:
            features[run.side].update(re.findall(r"(\w+) = 1", run.facts.get("built_for") or ""))
        return sorted(features["ours"] - features["peer"]) if features["peer"] else []

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "driven": self.driven,
            "peer": self.peer,
            "notes": self.notes,
            "rows": [_row_json(row) for row in self.rows],
            "runs": [asdict(run) for run in self.runs],
        }


@dataclass
class Report:
    """Results of one call of `cllm bench`, written after each workload, so that a broken run keeps what it has."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    file: Path | None = None
    results: list[Result] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    def save(self) -> None:
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "started": self.started,
            "machine": self.machine,
            "settings": self.settings,
            "workloads": [result.to_json() for result in self.results],
            "failures": self.failures,
        }
        self.file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def print_result(console: Console, result: Result) -> None:
    table = Table(title=result.title, title_justify="left", caption="\n".join(result.notes), caption_justify="left")
    table.add_column("metric")
    for heading in (result.driven, result.peer or "no peer", "ratio", "required"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for row in result.rows:
        table.add_row(
            row.figure.label,
            _with_unit(row.ours, row.figure.unit),
            _with_unit(row.peer, row.figure.unit),
            _with_unit(row.ratio, "x"),
            row.figure.required,
            {None: "", True: "[green]met[/green]", False: "[red]not met[/red]"}[row.met],
        )
    console.print(table)


def print_machine(console: Console, machine: dict[str, Any]) -> None:
    gib = machine["memory_bytes"] / 2**30
    console.print(
        f"{machine['cpu']}, {machine['physical_cores']} cores, {gib:.0f} GiB; "
        f"ratio: how many times better than the peer in the same repeat (over 1: cLLM is better)"
    )


def number(value: float) -> str:
    """Three digits that matter, without exponents."""
    magnitude = abs(value)
    if magnitude >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3}f}"


def _with_unit(spread: Spread | None, unit: str) -> str:
    """The median and, where there were several repeats, the range."""
    if spread is None:
        return ""
    text = f"{number(spread.median)}{'' if unit == 'x' else ' '}{unit}".rstrip()
    if spread.low == spread.high:
        return text
    return f"{text} ({number(spread.low)}..{number(spread.high)})"


def _row_json(row: Row) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in ("ours", "peer", "ratio")}
    return {
        "key": row.figure.key,
        "label": row.figure.label,
        "unit": row.figure.unit,
        **{name: None if spread is None else asdict(spread) for name, spread in values.items()},
        "required": row.figure.required or None,
        "met": row.met,
    }
