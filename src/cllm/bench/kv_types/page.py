"""The page: the table, and two plots over the bytes that a token takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from cllm.bench.http import BenchError
from cllm.bench.kv_types.measure import REFERENCE, Measured, OfPair
from cllm.bench.kv_types.results import headings, lines, notes, ratios, title, verdict_lines
from cllm.bench.page.html import FILE, banner, facts_html, figure_html, framed, machine_facts, table_html
from cllm.bench.page.plots import Plot
from cllm.bench.page.svg import Series, line_plot
from cllm.kv.memory import CPU_KV_TYPES

BYTES = "bytes per token"


def write(directory: Path, settings: Mapping[str, Any], machine: dict[str, Any], found: Measured) -> Path:
    file = directory / FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(framed(_body(settings, machine, found)), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {file}: {error.strerror or error}") from error
    return file


def _body(settings: Mapping[str, Any], machine: dict[str, Any], found: Measured) -> Iterator[str]:
    yield f"<h1>{escape(title(found))}</h1>"
    if settings.get("quick"):
        yield banner("Small sizes (--quick): the figures mean nothing.")
    columns = headings(found)
    # No column of verdicts: an empty one keeps the last figure from being taken for it.
    yield table_html([*columns, ""], [[*line, ""] for line in lines(found)], range(2, len(columns)))
    said = [*verdict_lines(found), *notes(found)]
    yield "<ul class=notes>" + "".join(f"<li>{escape(line)}</li>" for line in said) + "</ul>"
    yield f"<div class=plots>{''.join(map(figure_html, plots(found)))}</div>"
    yield "<h2>Machine and settings</h2>"
    yield facts_html({**machine_facts(machine), **{key: value for key, value in settings.items() if value}})


def plots(found: Measured) -> Iterator[Plot]:
    if all(of.quality.positions for of in found.pairs.values()):
        change = _by_keys(found, lambda of: 100 * of.quality.perplexity_change)
        yield _plot("Loss against bytes: perplexity", change, "% above f16/f16")
        divergence = _by_keys(found, lambda of: of.quality.mean_divergence)
        yield _plot("Loss against bytes: mean KL from f16/f16", divergence, "nats")
    reference = found.pairs[REFERENCE]
    for work in found.works:
        speeds = _by_keys(found, lambda of, key=work.key: ratios(of, reference, key))  # type: ignore[misc]
        if speeds:
            yield _plot(f"Speed against bytes: {work.label}", speeds, "times f16/f16")


def _by_keys(found: Measured, height: Callable[[OfPair], float | None]) -> list[Series]:
    """A line for each type of K, over the types of V."""
    series = []
    for colour, type_k in enumerate(CPU_KV_TYPES):
        of_type = [of for pair, of in found.pairs.items() if pair.type_k == type_k]
        points = [(float(of.bytes_per_token), y) for of in of_type if (y := height(of)) is not None]
        if points:
            series.append(Series(f"K {type_k}, V f16 to q4_0", points, colour, "both"))
    return series


def _plot(name: str, series: list[Series], y_label: str) -> Plot:
    svg = line_plot(series, x_label=BYTES, y_label=y_label)
    return Plot(name, svg, [(one.name, one.colour) for one in series])
