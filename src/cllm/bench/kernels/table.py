"""The figures, their verdicts, the table and the JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cllm.bench.figures import OURS as OUR_SIDE
from cllm.bench.figures import Beside, Figure, Row, Run, Spread, own, summarise, times_the_peer
from cllm.bench.json_file import write_json
from cllm.bench.kernels.works import (
    ELSEWHERE_LABEL,
    FIRST_TOKEN,
    FIRST_TOKEN_S,
    HELD,
    MEMORY,
    MEMORY_OVER_MB,
    ONE_SHORT,
    OURS,
    PACKED_OVER_FILE,
    PREFILL,
    ROWS,
    ROWS_OVER_ONE,
    SLOW_DOWN_PERCENT,
    Comparison,
    Plan,
    Work,
)
from cllm.bench.report import number, with_unit

MACHINE = "machine"
SPEED = "tok/s"

INT8, GROUPED_INT8 = "int8", "grouped int8"
READ, MODEL_READ = "read", "model read"

Repeats = Mapping[int, float]
"""Values by repeat."""


@dataclass
class Measured:
    """All that a run gave: values by what was measured, who did it and repeat."""

    plan: Plan
    macs_per_token: float
    bytes_per_token: float
    """Of weights that one token has to read, as the file stores them."""
    file_bytes: float
    """Of all weights."""
    values: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    variants: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The settings each peer ran a piece of work with."""
    facts: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    profiles: dict[str, Mapping[str, float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Peers that could not take part, and why."""
    failures: dict[str, str] = field(default_factory=dict)
    """Work that broke off, and why."""
    busy_percent: float = 0.0
    """How busy the machine was at most when it should have been idle."""

    def add(self, what: str, who: str, repeat: int, value: float) -> None:
        self.values.setdefault((what, who), {})[repeat] = value

    def of(self, what: str, who: str) -> Repeats:
        return self.values.get((what, who), {})


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: ours, and perhaps one other."""

    row: Row
    against: str | None = None

    @property
    def beside(self) -> Beside:
        return self.row.peers.get(self.against or "", Beside(None, None))

    @property
    def measured(self) -> bool:
        return self.row.ours is not None or (self.beside.value is not None and self.row.figure.limit is None)

    @property
    def required(self) -> str:
        return self.row.figure.required(self.against)

    @property
    def outcome(self) -> str:
        if not self.required:
            return ""
        return str(self.row.verdict(self.against) or "not measured")


def make_lines(measured: Measured) -> list[Line]:
    plan = measured.plan
    lines = [_compared(measured, comparison) for comparison in plan.comparisons if comparison.work is not HELD]
    known = plan.elsewhere
    lines += [_elsewhere(measured, work, known[work.key]) for work in plan.works if work.key in known]
    if ROWS in plan.works:
        lines.append(_rows(measured, OURS, plan.bound(ROWS.key, ROWS_OVER_ONE)))
        lines += [_rows(measured, peer.label, None) for peer in plan.peers_of(ROWS)]
    lines += _limits(measured)
    lines.append(_packed(measured))
    if FIRST_TOKEN in plan.apart:
        bound = plan.bound(FIRST_TOKEN, FIRST_TOKEN_S)
        lines.append(_own(measured, FIRST_TOKEN, "load to first token, file in page cache", "s", bound))
        lines.append(_own(measured, f"{FIRST_TOKEN} of process", "the same from the start of the process", "s", None))
    if HELD.key in plan.apart:
        lines.append(_slow_down(measured, OURS, plan.bound(HELD.key, SLOW_DOWN_PERCENT)))
        lines += [_slow_down(measured, each.peer.label, None) for each in plan.comparisons if each.work is HELD]
    if MEMORY in plan.apart:
        bound = plan.bound(MEMORY, MEMORY_OVER_MB)
        lines.append(_own(measured, MEMORY, "resident beyond weights and K/V in use", "MB", bound))
    return lines


def _compared(measured: Measured, comparison: Comparison) -> Line:
    work, peer = comparison.work, comparison.peer.label
    limit = None if comparison.times is None else times_the_peer(comparison.times)
    figure = Figure(work.key, work.label, SPEED, "higher", limit)
    return _line(figure, measured.of(work.key, OURS), peer, measured.of(work.key, peer))


def _elsewhere(measured: Measured, work: Work, value: float) -> Line:
    """Against a number from another machine: it must be passed, whatever the machines are."""
    ours = measured.of(work.key, OURS)
    figure = Figure(work.key, work.label, SPEED, "higher", times_the_peer(1.0))
    return _line(figure, ours, ELSEWHERE_LABEL, dict.fromkeys(ours or [0], value))


def _rows(measured: Measured, who: str, bound: float | None) -> Line:
    """How many times as long as a step of one token one of several takes. A peer's stands alone."""
    one, more = measured.of(ONE_SHORT.key, who), measured.of(ROWS.key, who)
    values = {repeat: ROWS.rows * one[repeat] / more[repeat] for repeat in one.keys() & more.keys()}
    label = f"a step of {ROWS.rows} tokens of 1 stream over one of 1"
    figure = Figure("rows-over-one", label, "x", "lower", None if bound is None else own(bound))
    return _line(figure, values) if who == OURS else _line(figure, {}, who, values)


def _packed(measured: Measured) -> Line:
    packed = measured.facts.get(OURS, {}).get("weight_bytes")
    figure = Figure("packed-over-file", "weights in memory over in the file", "x", "lower", own(PACKED_OVER_FILE))
    return _line(figure, {} if packed is None else {0: packed / measured.file_bytes})


def _limits(measured: Measured) -> list[Line]:
    """The machine's limits, beside which ours ran in the same repeat, and the share of them that we reach."""

    def line(what: str, label: str, unit: str, scale: float) -> Line:
        values = {repeat: value / scale for repeat, value in measured.of(what, MACHINE).items()}
        return _line(Figure(what, label, unit, "higher"), {}, "the limit", values)

    def share(key: str, label: str, work: str, per_token: float, what: str, bound: float | None) -> Line:
        limit, ours = measured.of(what, MACHINE), measured.of(work, OURS)
        values = {repeat: ours[repeat] * per_token / limit[repeat] for repeat in ours.keys() & limit.keys()}
        figure = Figure(key, label, "", "higher", None if bound is None else own(bound))
        return _line(figure, values)

    plan, prefill, one = measured.plan, PREFILL.key, ONE_SHORT.key
    macs, read = measured.macs_per_token, measured.bytes_per_token
    return [
        line(f"{prefill}: {INT8}", "int8 multiply-adds", "GMAC/s", 1e9),
        line(f"{prefill}: {GROUPED_INT8}", "the same, with a scale per 32 columns", "GMAC/s", 1e9),
        line(f"{one}: {READ}", "memory read, 256 MB", "GB/s", 1e9),
        line(f"{one}: {MODEL_READ}", "memory read, the weights' size or 1 GiB", "GB/s", 1e9),
        share("prefill-share", "prefill: share of int8", prefill, macs, f"{prefill}: {INT8}", plan.prefill_share),
        share("grouped-share", "prefill: share with scales", prefill, macs, f"{prefill}: {GROUPED_INT8}", None),
        share("stream-share", "1 stream: share of memory read", one, read, f"{one}: {MODEL_READ}", plan.stream_share),
    ]


def _own(measured: Measured, what: str, label: str, unit: str, bound: float | None) -> Line:
    figure = Figure(what, label, unit, "lower", None if bound is None else own(bound))
    return _line(figure, measured.of(what, OURS))


def _slow_down(measured: Measured, who: str, bound: float | None) -> Line:
    """A peer's stands alone: a ratio of two slow-downs would mean nothing."""
    figure = Figure(HELD.key, f"slow-down, {HELD.label}", "%", "lower", None if bound is None else own(bound))
    values = measured.of(HELD.key, who)
    return _line(figure, values) if who == OURS else _line(figure, {}, who, values)


def _line(figure: Figure, ours: Repeats, against: str | None = None, theirs: Repeats | None = None) -> Line:
    runs = [Run(OUR_SIDE, repeat, {figure.key: value}) for repeat, value in ours.items()]
    if against is not None:
        runs += [Run(against, repeat, {figure.key: value}) for repeat, value in (theirs or {}).items()]
    row = summarise([figure], runs)[0]
    if against is not None and against not in row.peers:
        row = Row(figure, row.ours, {against: Beside(None, None)})
    return Line(row, against)


def print_lines(console: Console, lines: Sequence[Line], notes: Sequence[str]) -> None:
    table = Table(title="kernels: the engine without a server", title_justify="left")
    table.add_column("work")
    table.add_column(OURS, justify="right")
    table.add_column("against")
    for heading in ("its figure", "ratio", "must reach"):
        table.add_column(heading, justify="right")
    table.add_column("outcome")
    for line in lines:
        figure = line.row.figure
        table.add_row(
            figure.label,
            with_unit(line.row.ours, figure.unit),
            escape(line.against or ""),
            with_unit(line.beside.value, figure.unit),
            with_unit(line.beside.ratio, "x"),
            line.required,
            _coloured(line.outcome),
        )
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def _coloured(outcome: str) -> str:
    if not outcome:
        return ""
    colour = "red" if outcome.startswith("not met") else "green" if outcome.startswith("met") else "yellow"
    return f"[{colour}]{outcome}[/{colour}]"


def print_profiles(console: Console, profiles: Mapping[str, Mapping[str, float]]) -> None:
    for work, phases in profiles.items():
        total = sum(phases.values())
        table = Table(title=f"profile: {work}, one pass, {total * 1e3:.1f} ms in all", title_justify="left")
        table.add_column("phase")
        table.add_column("ms", justify="right")
        table.add_column("share", justify="right")
        for phase, seconds in sorted(phases.items(), key=lambda item: -item[1]):
            table.add_row(phase, number(seconds * 1e3), f"{seconds / total:.1%}" if total else "")
        console.print(table)


def make_notes(measured: Measured) -> list[str]:
    notes = [f"{peer}: {settings}" for peer, settings in _variant_lines(measured).items()]
    if measured.plan.elsewhere:
        notes.append(f"{ELSEWHERE_LABEL}: fixed numbers, two cores with AVX2 only; the machine differs")
    notes += [f"left out: {peer}: {reason}" for peer, reason in measured.left_out.items()]
    notes += [f"failed: {work}: {reason}" for work, reason in measured.failures.items()]
    if measured.busy_percent > 10:
        notes.append(f"the machine was up to {measured.busy_percent:.0f} % busy at rest: figures are doubtful")
    return notes


def _variant_lines(measured: Measured) -> dict[str, str]:
    return {
        what: ", ".join(f"{name} {'on' if value else 'off'}" for name, value in settings.items())
        for what, settings in measured.variants.items()
        if settings
    }


def save(file: Path, settings: Mapping[str, Any], machine: Mapping[str, Any], measured: Measured) -> None:
    lines = [
        {
            "key": line.row.figure.key,
            "work": line.row.figure.label,
            "unit": line.row.figure.unit,
            "ours": _spread_json(line.row.ours),
            "against": line.against,
            "theirs": _spread_json(line.beside.value),
            "ratio": line.beside.ratio and line.beside.ratio._asdict(),
            "must_reach": line.required,
            "outcome": line.outcome,
        }
        for line in make_lines(measured)
    ]
    values = [
        {"what": what, "who": who, "values": list(repeats.values())} for (what, who), repeats in measured.values.items()
    ]
    content = {
        "machine": machine,
        "settings": settings,
        "lines": lines,
        "notes": make_notes(measured),
        "values": values,
        "macs_per_token": measured.macs_per_token,
        "weight_bytes_per_token": measured.bytes_per_token,
        "file_weight_bytes": measured.file_bytes,
        "facts": measured.facts,
        "profiles": measured.profiles,
        "failures": measured.failures,
    }
    write_json(file, content)


def _spread_json(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else asdict(spread)
