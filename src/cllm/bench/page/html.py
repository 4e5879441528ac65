"""The page: what was asked, on which machine, what came out, and how it looks over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cllm.bench.page.plots import Plot, beside_peers, over_concurrency, plots_of
from cllm.bench.page.style import STYLE
from cllm.bench.report import Report, Result, headings, lines_of, table_lines, with_unit

FILE = "index.html"


def write_page(report: Report, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / FILE
    file.write_text(render(report), encoding="utf-8")
    return file


def render(report: Report) -> str:
    body = [*_head(report), *_overview(report)]
    for number, result in enumerate(report.results):
        body += _section(number, result)
    return framed(body)


def framed(body: Iterable[str]) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>cLLM benchmark</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _head(report: Report) -> Iterator[str]:
    settings = report.settings
    yield f"<h1>cLLM benchmark</h1><p class=soft>{escape(report.started)}</p>"
    if report.interrupted:
        yield banner("This run was interrupted: the figures are of what was measured until then.")
    if settings.get("quick"):
        yield banner("Small sizes (--quick): the figures mean nothing.")
    for title, why in report.failures.items():
        yield banner(f"{title} failed: {why}")
    if report.results:
        links = (f'<a href="#r{number}">{escape(one.label)}</a>' for number, one in enumerate(report.results))
        yield f"<nav>{''.join(links)}</nav>"
    yield "<h2>Machine and settings</h2>"
    yield facts_html({**machine_facts(report.machine), **{key: value for key, value in settings.items() if value}})


def _overview(report: Report) -> Iterator[str]:
    lines = list(_required(report.results))
    if lines:
        yield "<h2>What must be reached</h2>"
        columns = ["work", "figure", "ours", "against", "its figure", "ratio", "required", "verdict"]
        yield table_html(columns, lines, numbers=(2, 4, 5, 6))
        yield (
            "<p class=soft>A ratio says how many times better we are than the peer in the same repeat; in brackets its "
            "95&nbsp;% interval. <i>Within noise</i>: the bound lies inside the interval, so that the next run might "
            "turn the verdict.</p>"
        )
    peers = beside_peers(report.results)
    if peers is not None:
        yield figure_html(peers, "wide")
    plots = [figure_html(plot) for plot in over_concurrency(report.results)]
    if plots:
        yield f"<div class=plots>{''.join(plots)}</div>"


def _required(results: Iterable[Result]) -> Iterator[list[str]]:
    for result in results:
        for row in result.rows:
            for line in lines_of(row):
                if line[-2]:
                    yield [result.label, row.figure.label, with_unit(row.ours, row.figure.unit), *line[2:]]


def _section(number: int, result: Result) -> Iterator[str]:
    yield f'<h2 id="r{number}">{escape(result.title)}</h2>'
    columns = headings(result)
    numbers = [column for column, heading in enumerate(columns) if heading not in ("", "against", "verdict")]
    yield table_html(columns, table_lines(result), numbers)
    if result.notes:
        yield "<ul class=notes>" + "".join(f"<li>{escape(note)}</li>" for note in result.notes) + "</ul>"
    plots = [figure_html(plot) for plot in plots_of(result)]
    if plots:
        yield f"<div class=plots>{''.join(plots)}</div>"


def figure_html(plot: Plot, look: str = "") -> str:
    names = "".join(f'<span><i class="s{colour % 6}"></i>{escape(name)}</span>' for name, colour in plot.legend)
    legend = f"<div class=legend>{names}</div>" if names else ""
    return f'<figure class="{look}"><figcaption>{escape(plot.title)}</figcaption>{legend}{plot.svg}</figure>'


def table_html(columns: Sequence[str], lines: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    def cell(tag: str, column: int, text: str) -> str:
        look = ' class="number"' if column in numbers else ""
        last = tag == "td" and column == len(columns) - 1
        return f"<{tag}{look}>{_verdict(text) if last else escape(text)}</{tag}>"

    head = "".join(cell("th", column, text) for column, text in enumerate(columns))
    rows = ("".join(cell("td", column, text) for column, text in enumerate(line)) for line in lines)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _verdict(text: str) -> str:
    look = "noise" if "noise" in text else "met" if text == "met" else "not"
    return f'<span class="{look}">{escape(text)}</span>' if text else ""


def facts_html(facts: dict[str, Any]) -> str:
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(_shown(value))}</td></tr>" for name, value in facts.items())
    return f"<div class=scroll><table>{''.join(rows)}</table></div>"


def machine_facts(machine: dict[str, Any]) -> dict[str, Any]:
    return {
        "processor": f"{machine['cpu']}, {machine['physical_cores']} cores ({machine['logical_cores']} logical)",
        "its features": machine["cpu_features"],
        "memory": f"{machine['memory_bytes'] / 2**30:.1f} GiB",
        "system": machine["system"],
        "Python": machine["python"],
        "versions": machine["versions"],
    }


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "yes" if value is True else str(value)


def banner(text: str) -> str:
    return f"<div class=banner>{escape(text)}</div>"
