"""What was measured by number of threads: the table and the JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cllm.bench.http import BenchError
from cllm.bench.json_file import write_json
from cllm.bench.kernels.works import SCALING_WORKS
from cllm.bench.machine import describe_machine

MOST_BUSY_PERCENT = 10


@dataclass(slots=True)
class Scaling:
    """What one model gave: values by number of threads and work, one for each repeat."""

    name: str
    works: list[str]
    default: int
    instruction_set: str = ""
    weight_bytes: int = 0
    speeds: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """Tokens a second."""
    shares: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """Of the limit measured in the same turn, for works that have one."""
    limits: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    busy_percent: float = 0.0
    """How busy the machine was at most when it should have been idle."""
    interrupted: bool = False

    def speed(self, threads: int, work: str) -> float | None:
        return _middle(self.speeds, threads, work)

    def share(self, threads: int, work: str) -> float | None:
        return _middle(self.shares, threads, work)

    def best(self, work: str) -> float:
        return max((speed for threads in self.speeds if (speed := self.speed(threads, work))), default=0.0)

    def of_best(self, threads: int, work: str) -> float | None:
        speed = self.speed(threads, work)
        return None if speed is None else speed / self.best(work)


def _middle(values: Mapping[int, Mapping[str, Sequence[float]]], threads: int, work: str) -> float | None:
    each = values.get(threads, {}).get(work)
    return median(each) if each else None


def table(found: Scaling) -> str:
    """In Markdown, aligned."""
    labels = {work.key: work.label for work in SCALING_WORKS}
    rows = [["threads", *(labels[key].removeprefix("decode, ") for key in found.works)]]
    rows.append(["---:"] * len(rows[0]))
    for threads in sorted(found.speeds):
        mark = " (default)" if threads == found.default else ""
        rows.append([f"{threads}{mark}", *(_cell(found, threads, key) for key in found.works)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines[1] = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([_title(found), "", *lines, "", *notes(found)])


def _title(found: Scaling) -> str:
    size = f"{found.weight_bytes / 1e9:.2f} GB of weights" if found.weight_bytes else "nothing was measured"
    return f"{found.name}: {size}, {found.instruction_set or 'no engine'}"


def _cell(found: Scaling, threads: int, work: str) -> str:
    speed, share, of_best = found.speed(threads, work), found.share(threads, work), found.of_best(threads, work)
    if speed is None or of_best is None:
        return ""
    shown = f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"
    return f"{shown} ({share:.2f}) {of_best:4.0%}" if share is not None else f"{shown} {of_best:4.0%}"


def notes(found: Scaling) -> list[str]:
    lines = [
        "tokens/s, medians; in brackets the share of the limit with as many threads (prefill: int8 multiply-adds with "
        "scales, 1 stream: memory read); in percent beside the best row"
    ]
    reached = {key: found.of_best(found.default, key) for key in found.works}
    shares = {key: value for key, value in reached.items() if value is not None}
    if shares:
        worst = min(shares, key=lambda key: shares[key])
        lines.append(f"the default, {found.default} threads: at least {shares[worst]:.0%} of the best row ({worst})")
    if found.busy_percent > MOST_BUSY_PERCENT:
        lines.append(f"the machine was up to {found.busy_percent:.0f} % busy at rest: figures are doubtful")
    if found.interrupted:
        lines.append("interrupted: not all was measured")
    return lines


def save(file: Path, settings: Mapping[str, Any], results: Sequence[Scaling]) -> None:
    content = {
        "machine": describe_machine(),
        "settings": settings,
        "results": [asdict(found) | {"table": table(found).splitlines()} for found in results],
    }
    write_json(file, content)


def load(file: Path) -> list[Scaling]:
    """What `save` wrote."""
    try:
        results = json.loads(file.read_text(encoding="utf-8"))["results"]
        return [_loaded(result) for result in results]
    except OSError as error:
        raise BenchError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{file} is no file of `--json` with several numbers of threads") from error


def _loaded(result: dict[str, Any]) -> Scaling:
    result.pop("table")
    for name in ("speeds", "shares", "limits"):
        result[name] = {int(threads): values for threads, values in result[name].items()}
    return Scaling(**result)
