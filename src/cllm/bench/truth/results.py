"""What was measured: the table and the JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cllm.bench.json_file import write_json
from cllm.bench.truth.measure import TRUTH, Measured, OfSide

_HEADINGS = ("engine", "computed with", "K/V", "perplexity", "change", "same top token", "mean KL")


def table(found: Measured) -> str:
    """In Markdown, aligned."""
    truth = "" if found.perplexity is None else f"{found.perplexity:.3f}"
    rows = [list(_HEADINGS), [TRUTH, "transformers", TRUTH, truth, "", "", "0"], *map(_line, found.sides)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    shown = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    shown.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join([f"{found.model}: distance to the truth", "", *shown, "", *notes(found)])


def _line(of: OfSide) -> list[str]:
    distance = of.distance
    cells = [of.engine, of.way, of.kv_type]
    if not distance.positions:
        return [*cells, "", "", "", ""]
    return [
        *cells,
        f"{distance.perplexity:.3f}",
        f"{100 * distance.perplexity_change:+.2f} %",
        f"{100 * distance.agreement:.1f} %",
        f"{distance.mean_divergence:.5f}",
    ]


def notes(found: Measured) -> list[str]:
    positions = max((side.distance.positions for side in found.sides), default=0)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    lines = [
        f"over {positions:,} positions; the truth is the same weights computed in float32 ({versions}); change, same "
        "top token and KL (Kullback-Leibler divergence, nats) beside it"
    ]
    lines += [
        f"{side.engine}, {side.way}, K/V {side.kv_type}: over {side.distance.positions:,} positions only"
        for side in found.sides
        if 0 < side.distance.positions < positions
    ]
    lines += [f"left out: {side}: {reason}" for side, reason in found.left_out.items()]
    if found.interrupted:
        lines.append("interrupted: not all was measured")
    return lines


def save(file: Path, settings: Mapping[str, Any], machine: Mapping[str, Any], found: Measured) -> None:
    content = {
        "machine": machine,
        "settings": settings,
        "model": found.model,
        "truth": {"versions": found.versions, "perplexity": found.perplexity},
        "sides": [_side_json(side) for side in found.sides],
        "left_out": found.left_out,
        "notes": notes(found),
        "table": table(found).splitlines(),
    }
    write_json(file, content)


def _side_json(of: OfSide) -> dict[str, Any]:
    distance = of.distance
    known = (
        {
            "perplexity": distance.perplexity,
            "perplexity_change": distance.perplexity_change,
            "same_top": distance.agreement,
            "mean_kl": distance.mean_divergence,
        }
        if distance.positions
        else {}
    )
    who = {"engine": of.engine, "computed_with": of.way, "kv_type": of.kv_type}
    return {**who, "positions": distance.positions, **known}
