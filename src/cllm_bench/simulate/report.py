"""Results on the screen and in files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from cllm_bench.simulate.cost import CostModel
from cllm_bench.simulate.results import Result, traces_of

Show = Callable[[dict[str, float]], str]
Column = tuple[str, Show]


def _figure(name: str, scale: float = 1.0) -> Show:
    return lambda figures: short(figures[name] * scale)


def short(value: float) -> str:
    """Three digits that matter."""
    if math.isnan(value):
        return "-"
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return "0" if value == 0 else f"{value:,.{digits}f}"


def count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if value >= limit:
            return f"{short(value / (1e3 if unit == 'k' else limit))}{unit}"
    return f"{value:,.0f}"


def _count(name: str) -> Show:
    return lambda figures: count(figures[name])


COLUMNS: list[Column] = [
    ("not\ndone", lambda f: count(f["requests"] - f["completed"])),
    ("answer\ntokens/s", _figure("answer_tokens_per_s")),
    ("first (s)\nP50", _figure("ttft_p50_s")),
    ("\nP95", _figure("ttft_p95_s")),
    ("\nP99", _figure("ttft_p99_s")),
    ("gap (ms)\nP99", _figure("token_gap_p99_s", 1e3)),
    ("request (s)\nP50", _figure("total_p50_s")),
    ("\nP95", _figure("total_p95_s")),
    ("cache\nhits %", _figure("hit_rate", 100)),
    ("saved\nh", _figure("saved_s", 1 / 3600)),
    ("pre-\nempted", _count("preemptions")),
    ("tokens\nevicted", _count("evicted_tokens")),
]
BALANCE: Column = ("busiest\n/ mean", _figure("balance"))
"""With several servers."""


def shown_columns(results: Sequence[Result]) -> list[Column]:
    return [*COLUMNS, BALANCE] if any(result.settings.replicas > 1 for result in results) else COLUMNS


def shown_varied(result: Result) -> list[str]:
    return [f"{value:,}" if isinstance(value, int) else str(value) for value in result.varied.values()]


def print_results(console: Console, results: Sequence[Result]) -> None:
    if not results:
        return
    console.print(f"{traces_of(results)}; cost model {results[0].cost}", highlight=False, soft_wrap=True)
    columns = shown_columns(results)
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for label in (*(f"\n{key}" for key in results[0].varied), *(label for label, _ in columns)):
        table.add_column(label, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*shown_varied(result), *(show(result.figures) for _, show in columns))
    # As wide as it is: a narrow terminal breaks its lines, which is better than to leave digits out.
    table.width = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.print(table, crop=False, soft_wrap=True)
    tokens = sum(result.figures["computed_tokens"] for result in results)
    wall_s = sum(result.figures["wall_s"] for result in results)
    console.print(f"{count(tokens)} scheduled tokens in {short(wall_s)} s, {count(tokens / wall_s)} a second")
    if any(result.interrupted for result in results):
        console.print("interrupted: the last line has what was simulated until then")


def to_json(results: Sequence[Result], cost: CostModel) -> dict[str, Any]:
    return {"cost": asdict(cost), "results": [_finite(result.to_json()) for result in results]}


def _finite(value: Any) -> Any:
    """JSON has no NaN: where there was nothing to measure stands null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
