"""The tables on the screen and the files for later: JSON with everything, and a page with plots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cllm.observe.json_option import write_json
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, PeerFigure, Row, Run, Spread, sides, summarise
from cllm_bench.stats import Interval

QUICK = "Small sizes (--quick): this shows that everything runs; the figures mean nothing."
_BUSY_PERCENT = 10.0
"""A machine busier than this before a pass makes its figures doubtful."""


@dataclass(frozen=True, eq=False)
class Result:
    """Everything that one workload gave."""

    name: str
    title: str
    driven: str
    """The name above the first column: cLLM, or the address that was driven in its place."""
    figures: Sequence[Figure]
    runs: Sequence[Run]
    rows: Sequence[Row]
    by_side: str | None = None
    """The table has a row for each side and a column for each figure, beside those of this side."""

    @property
    def peers(self) -> list[str]:
        return sides(self.runs)[1:]

    @property
    def judged(self) -> bool:
        """Whether anything must be reached."""
        return any(figure.limit is not None for figure in self.figures)

    def runs_of(self, side: str) -> list[Run]:
        return [run for run in self.runs if run.side == side]

    def shown(self, side: str) -> str:
        return self.driven if side == OURS else side

    @property
    def broken_off(self) -> dict[str, str]:
        """Passes that did not come to their end, and why."""
        return {f"{self.shown(run.side)}, pass {run.repeat + 1}": run.partial for run in self.runs if run.partial}

    @property
    def notes(self) -> list[str]:
        """What a reader must know to judge the figures."""
        notes = [f"partial: {which}: {why}" for which, why in self.broken_off.items()]
        for side in sides(self.runs):
            facts = [run.facts for run in self.runs if run.side == side]
            settings = sorted({fact["settings"] for fact in facts if fact.get("settings")})
            if settings:
                notes.append(f"{self.shown(side)}: {'; '.join(settings)}")
            errors = [fact["first_error"] for fact in facts if "first_error" in fact]
            if errors:
                notes.append(f"{self.shown(side)} failed some requests, first: {errors[0]}")
            notes += dict.fromkeys(
                f"left out: {self.shown(side)}: {fact['left_out']}" for fact in facts if "left_out" in fact
            )
        notes += dict.fromkeys(note for run in self.runs for note in run.facts.get("notes", ()))
        busiest = max((run.facts.get("busy_percent_before", 0.0) for run in self.runs), default=0.0)
        if busiest > _BUSY_PERCENT:
            notes.append(f"the machine was up to {busiest:.0f} % busy before a pass: figures are doubtful")
        return notes

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "driven": self.driven,
            "peers": self.peers,
            "rows": [_row_json(row) for row in self.rows],
            "notes": self.notes,
            "runs": [_run_json(run) for run in self.runs],
        }


@dataclass
class Report:
    machine: dict[str, Any]
    settings: dict[str, Any]
    file: Path | None = None
    directory: Path | None = None
    """Where the page goes."""
    results: list[Result] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    @property
    def ok(self) -> bool:
        return not self.failures and not any(result.broken_off for result in self.results)

    def save(self) -> list[Path]:
        """Write what there is; it is called after every workload, so that little is ever lost."""
        written = []
        try:
            if self.file is not None:
                write_json(self.file, self.to_json())
                written.append(self.file)
            if self.directory is not None:
                from cllm_bench.page import write_report

                written.append(write_report(self, self.directory))
        except OSError as error:
            raise BenchError(f"cannot write {error.filename or 'the report'}: {error.strerror}") from error
        return written

    def to_json(self) -> dict[str, Any]:
        return {
            "started": self.started,
            "machine": self.machine,
            "settings": self.settings,
            "interrupted": self.interrupted,
            "workloads": [result.to_json() for result in self.results],
            "failures": self.failures,
        }


def print_result(console: Console, result: Result) -> None:
    console.print("\n".join(markdown(result)), "", sep="\n", markup=False, highlight=False, soft_wrap=True)


def headings(result: Result) -> list[str]:
    """The headings of a result's table: a peer has a column by its name; several share two."""
    if result.by_side is not None:
        return ["", *(f"{figure.label}, {figure.unit}".rstrip(", ") for figure in _measured(result))]
    peers = result.peers
    beside = ["against", "its figure", "ratio"] if len(peers) > 1 else [*peers, "ratio"] if peers else []
    return ["", result.driven, *beside, *(["required", "verdict"] if result.judged else [])]


def table_lines(result: Result) -> list[list[str]]:
    """What stands below the headings: a line for each figure that was measured, and for each peer after the first."""
    if result.by_side is not None:
        return _side_lines(result)
    lines = [line if result.judged else line[:-2] for row in result.rows for line in lines_of(row)]
    if len(result.peers) == 1:
        return [[*line[:2], *line[3:]] for line in lines]
    return lines if result.peers else [[*line[:2], *line[5:]] for line in lines]


def lines_of(row: Row) -> list[list[str]]:
    """A figure, ours, the peer's name, its figure, the ratio, what is required, the verdict; one line for each peer."""
    figure = row.figure
    if row.ours is None and not any(beside.value for beside in row.peers.values()):
        return []
    lines = []
    first = True
    measured: list[tuple[str | None, PeerFigure]] = [(peer, each) for peer, each in row.peers.items() if each.value]
    for peer, beside in measured or [(None, PeerFigure(None, None))]:
        judged = peer if figure.limit is None or figure.limit.on == "ratio" else None
        counts = first or judged is not None
        lines.append(
            [
                figure.label if first else "",
                with_unit(row.ours, figure.unit) if first else "",
                peer or "",
                with_unit(beside.value, figure.unit),
                with_unit(beside.ratio, "x"),
                figure.required(judged) if counts else "",
                str((counts and row.verdict(judged)) or ""),
            ]
        )
        first = False
    return lines


def print_machine(console: Console, machine: dict[str, Any]) -> None:
    gib = machine["memory_bytes"] / 2**30
    limit = f" ({machine['cpu_limit']})" if machine["cpu_limit"] else ""
    console.print(
        f"{machine['cpu']}, {machine['physical_cores']} cores{limit}, {gib:.0f} GiB; "
        "ratio: how many times better than the peer in the same repeat (over 1: cLLM is better), with its 95 % interval"
    )


def number(value: float) -> str:
    """Three digits that matter, without exponents."""
    magnitude = abs(value)
    if magnitude == 0:
        return "0"
    if magnitude >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3}f}"


def with_unit(value: Spread | Interval | None, unit: str) -> str:
    """The middle and, where it is known, how far it may be from that."""
    if value is None:
        return ""
    middle = value.median if isinstance(value, Spread) else value.estimate
    text = f"{number(middle)}{'' if unit == 'x' else ' '}{unit}".rstrip()
    if value.low == value.high:
        return text
    return f"{text} ({number(value.low)}..{number(value.high)})"


def markdown(result: Result) -> list[str]:
    """The table, aligned, and what is said below it."""
    rows = [headings(result), *table_lines(result)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = [heading in ("", "against", "verdict") for heading in rows[0]]
    lines = []
    for row in rows:
        cells = zip(row, widths, texts, strict=True)
        lines.append(
            "| " + " | ".join(cell.ljust(width) if text else cell.rjust(width) for cell, width, text in cells) + " |"
        )
    rule = ("-" * (width + 1) + ("-" if text else ":") for width, text in zip(widths, texts, strict=True))
    lines.insert(1, "|" + "|".join(rule) + "|")
    verdicts = verdict_lines(result) if result.by_side is not None else []
    return [result.title, "", *lines, "", *verdicts, *result.notes]


def verdict_lines(result: Result) -> list[str]:
    """What must be reached by the side under test."""
    lines = []
    for row in result.rows:
        for peer in (None, *row.peers):
            verdict = row.verdict(peer)
            if verdict is not None:
                value = with_unit(row.ours, row.figure.unit) if peer is None else with_unit(row.peers[peer].ratio, "x")
                required = row.figure.required(peer)
                lines.append(f"{result.driven}: {row.figure.label}: {value}, must be {required}: {verdict}")
    return lines


def times_reference(result: Result, figure: Figure, side: str) -> Interval | None:
    """How many times better than the side they are all compared with, in the same repeats."""
    renamed = {side: OURS, result.by_side: "reference"} if side != result.by_side else {}
    runs = [replace(run, side=renamed[run.side]) for run in result.runs if run.side in renamed]
    peers = summarise([figure], runs)[0].peers
    return peers["reference"].ratio if "reference" in peers else None


def _measured(result: Result) -> list[Figure]:
    return [figure for figure in result.figures if any(figure.key in run.metrics for run in result.runs)]


def _side_lines(result: Result) -> list[list[str]]:
    lines = []
    for side in dict.fromkeys(run.side for run in result.runs):
        rows = summarise(_measured(result), [replace(run, side=OURS) for run in result.runs if run.side == side])
        lines.append([result.shown(side), *(_side_cell(result, row, side) for row in rows)])
    return lines


def _side_cell(result: Result, row: Row, side: str) -> str:
    if row.ours is None:
        return ""
    value = format(row.ours.median, row.figure.format) if row.figure.format else number(row.ours.median)
    times = times_reference(result, row.figure, side)
    return value if times is None else f"{value} ({times.estimate:.2f}x)"


def _row_json(row: Row) -> dict[str, Any]:
    figure = row.figure
    return {
        "key": figure.key,
        "label": figure.label,
        "unit": figure.unit,
        "ours": _spread_json(row.ours),
        **_judged(row, None),
        "peers": {
            peer: {
                "value": _spread_json(each.value),
                "ratio": each.ratio._asdict() if each.ratio else None,
                **_judged(row, peer),
            }
            for peer, each in row.peers.items()
        },
    }


def _judged(row: Row, peer: str | None) -> dict[str, Any]:
    verdict = row.verdict(peer)
    return {
        "required": row.figure.required(peer) or None,
        "met": verdict.met if verdict else None,
        "clear": verdict.clear if verdict else None,
    }


def _spread_json(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else asdict(spread)


def _run_json(run: Run) -> dict[str, Any]:
    begin = min((answer.started for answer in run.answers), default=0.0)
    return {
        "side": run.side,
        "repeat": run.repeat,
        "partial": run.partial,
        "metrics": dict(run.metrics),
        "facts": dict(run.facts),
        "requests": [
            {
                "at_s": round(answer.started - begin, 4),
                "seconds": round(answer.seconds, 5) if answer.finished else None,
                "ttft_s": round(answer.ttft, 5) if answer.arrivals else None,
                "prompt_tokens": answer.prompt_tokens,
                "cached_tokens": answer.cached_tokens,
                "tokens": answer.completion_tokens,
                "left": answer.left,
                "error": answer.error,
            }
            for answer in run.answers
        ],
        "samples": [sample._asdict() for sample in run.samples],
    }
