"""What a person sees of a benchmark: the table, the live view, the page and its plots."""

from __future__ import annotations

import io
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench_kit import make_answer
from cllm.cli import main
from cllm_bench.figures import OURS, Figure, Limit, Run, own, summarise, times_the_peer
from cllm_bench.live import View, figures
from cllm_bench.machine import describe_machine
from cllm_bench.measures import measure, with_common
from cllm_bench.page import page_of as report_page
from cllm_bench.page import plots_of, thin, write_report
from cllm_bench.pages.page import Table, render, without_empty_columns
from cllm_bench.pages.plots import Plot, Series, tick_text
from cllm_bench.report import Report, Result, number, print_result
from cllm_bench.watch import Sample

FIGURES = [Figure("s", "total", "s", limit=times_the_peer(4.0)), Figure("gap", "worst gap", "ms", limit=own(400.0))]


def result_of(runs: list[Run], figures: list[Figure] = FIGURES, **more: object) -> Result:
    return Result("prefix", "prefix: 32 users", "cLLM", figures, runs, summarise(figures, runs), **more)  # type: ignore[arg-type]


def printed(result: Result) -> str:
    console = Console(width=160, file=io.StringIO(), force_terminal=False)
    with console.capture() as captured:
        print_result(console, result)
    return captured.get()


# -- table -----------------------------------------------------------------------------------------------------------


def test_the_table_shows_values_ratio_requirement_verdict_and_notes() -> None:
    runs = [
        Run(OURS, 0, {"s": 10.0, "gap": 500.0}, {"busy_percent_before": 60.0}),
        Run("llama-server", 0, {"s": 50.0, "gap": 13_430.0}, {"settings": "8 slots", "first_error": "it broke"}),
    ]
    text = printed(result_of(runs))
    for expected in (
        "10.0 s",
        "50.0 s",
        "5.00x",
        ">= 4x",
        "13,430 ms",
        "<= 400 ms",
        "8 slots",
        "60 % busy",
        "it broke",
    ):
        assert expected in text
    lines = [line for line in text.splitlines() if "total" in line or "worst gap" in line]
    assert [line.split("|")[-2].strip() for line in lines] == ["met", "not met"]


def test_several_peers_have_a_line_each_and_figures_nobody_has_have_none() -> None:
    runs = [
        Run(OURS, 0, {"s": 10.0, "gap": 100.0}),
        Run("llama-server", 0, {"s": 50.0}),
        Run("other", 0, {"s": 5.0}),
    ]
    named = Figure("s", "total", "s", limit=Limit("ratio", 4.0, {"llama-server": 4.0}))
    text = printed(result_of(runs, [named, FIGURES[1], Figure("none", "unmeasured", "s")]))
    assert "unmeasured" not in text
    (first,) = [line for line in text.splitlines() if "llama-server" in line]
    (second,) = [line for line in text.splitlines() if "other" in line]
    assert "5.00x" in first and ">= 4x" in first
    assert "0.500x" in second and ">=" not in second and "total" not in second


def test_a_broken_pass_is_marked() -> None:
    runs = [Run(OURS, 0, {"s": 10.0}, partial="the server is gone"), Run(OURS, 1, {"s": 20.0})]
    text = printed(result_of(runs))
    assert "partial: cLLM, pass 1: the server is gone" in text and "20.0 s" in text and "10.0 s" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (13_430.2, "13,430"),
        (123.4, "123"),
        (45.67, "45.7"),
        (1.049, "1.05"),
        (0.1234, "0.123"),
        (-2.5, "-2.50"),
        (0, "0"),
    ],
)
def test_numbers_show_what_matters(value: float, text: str) -> None:
    assert number(value) == text


# -- live view -------------------------------------------------------------------------------------------------------


def test_the_view_shows_what_came_in_so_far() -> None:
    running = make_answer(0.0, 0.5, 0.7)
    running.finished = None
    failed = make_answer(0.0)
    failed.error = "no"
    sample = Sample(1.0, 150.0, 321.0, 12.0, 34.0, 2, 5.0)
    lines = figures([make_answer(0.0, 0.1, 0.2), running, failed], [sample])
    assert lines[0] == "2 answers, 1 running, 1 failed" and lines[1].startswith("first token P50 300, P95 ")
    assert lines[2:] == ["321 MB resident", "KV 12 MB running, 34 MB cached"]
    assert figures([], []) == ["0 answers, 0 running, 0 failed"]


def test_the_view_says_what_is_being_done() -> None:
    screen = io.StringIO()
    View(Console(file=screen, width=100)).say("batch: 8 clients: cLLM, 1 of 3")
    assert screen.getvalue() == "batch: 8 clients: cLLM, 1 of 3\n"


# -- plots -----------------------------------------------------------------------------------------------------------


def texts(plot: Plot) -> list[str]:
    """What stands in it, axes and legend included."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", plot.svg)


def line_plot(*series: Series, **more: Any) -> Plot:
    axes = {"x_label": "request number", "y_label": "tokens per second"}
    return Plot(title="title", caption="It shows.", series=series, **axes, **more)


def test_a_plot_names_its_axes_and_its_lines() -> None:
    plot = line_plot(Series("ours", [(1, 5), (2, 6)], 0), Series("<peer>", [(1, 9), (4, 8)], 1, "dots"))
    assert {"request number", "tokens per second", "ours", "&lt;peer&gt;"} <= set(texts(plot))
    assert "var(--c0)" in plot.svg and "var(--c1)" in plot.svg and "#2160d8" not in plot.svg, "colours are the page's"


@pytest.mark.parametrize("log", [False, True])
def test_plots_of_little_are_drawn_without_complaint(log: bool, recwarn: pytest.WarningsRecorder) -> None:
    for points in ([(1.0, 0.0)], [(3.0, 3.0)], [(0.5, 7.0), (0.5, 7.0)], [(0.0, -1.0), (1.0, -2.0)]):
        plot = line_plot(Series("one", points), log_y=log)
        assert "nan" not in plot.svg
    assert [str(warning.message) for warning in recwarn] == []


def test_logarithmic_axes_have_round_numbers() -> None:
    plot = line_plot(Series("one", [(0.5, 3), (150, 900_000)]), log_y=True)
    assert {"10", "100", "10,000"} <= set(texts(plot))
    near = line_plot(Series("one", [(0, 24), (1, 38)]), log_y=True)
    assert {"25", "30", "35"} <= set(texts(near)), "between two powers, too"


def test_ticks_have_as_many_digits_as_they_need() -> None:
    values = (0, 0.25, 1.005, 2000, 3e6, 0.1 + 0.2)
    assert [tick_text(value) for value in values] == ["0", "0.25", "1.005", "2,000", "3M", "0.3"]


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("matplotlib", ["bench", "prefix", "--model", "absent.gguf", "--report", "page"]),
        ("matplotlib", ["bench", "kv-types", "--model", "absent.gguf", "--report", "page"]),
        ("scipy", ["bench", "prefix", "--model", "absent.gguf"]),
        ("scipy", ["bench", "kv-types", "--model", "absent.gguf"]),
        ("scipy", ["bench", "kernels", "--model", "absent.gguf"]),
    ],
)
def test_what_a_default_install_lacks_is_said_before_anything_begins(
    missing: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, error = capsys.readouterr()
    assert f"needs {missing}; " in error and error.endswith("scripts/install.py bench\n")
    assert len(error.strip().splitlines()) == 1
    assert out == "" and list(tmp_path.iterdir()) == []


def test_many_points_are_thinned_and_keep_their_ends() -> None:
    points = [(float(x), float(x)) for x in range(10_000)]
    thinned = thin(points)
    assert len(thinned) <= 500 and thinned[0] == points[0] and thinned[-1] == points[-1]
    assert thin(points[:10]) == points[:10]


# -- page ------------------------------------------------------------------------------------------------------------


class Well(HTMLParser):
    """Notes tags that are not closed, and what the page would fetch from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href") and not value.startswith("#")]  # type: ignore[union-attr]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def http_result(clients: int) -> Result:
    def run(side: str, factor: float, repeat: int) -> Run:
        answers = [make_answer(at, *(at + factor * (n + 1) / 10 for n in range(5))) for at in range(5)]
        kv = (3.0, 9.0, 2, 4.0) if side == OURS else (None, None, None, None)
        samples = [Sample(float(second), 90.0, 300.0 + second, *kv) for second in range(4)]
        metrics = measure(answers, samples)
        return Run(side, repeat, metrics, {}, answers, samples)

    runs = [run(side, factor, repeat) for repeat in (0, 1) for side, factor in ((OURS, 1.0), ("llama-server", 2.0))]
    figures = with_common([Figure("tokens_per_s", "tokens out", "tok/s", "higher", times_the_peer(1.1))])
    rows = summarise(figures, runs)
    title = f"batch: {clients} clients"
    return Result("batch", title, "cLLM", figures, runs, rows)


def page_of(*results: Result, **settings: object) -> str:
    report = Report(describe_machine(), {"model": "smollm2", **settings}, results=list(results))
    text = render(report_page(report))
    well = Well()
    well.feed(text)
    assert well.open == [] and well.fetched == [], "the page must be well formed and need nothing else"
    return text


def test_the_page_has_every_plot_with_its_units() -> None:
    text = page_of(http_result(1), http_result(8))
    for title in (
        "Latency over request number",
        "Time to first token, percentiles",
        "Between tokens, percentiles",
        "Whole request, percentiles",
        "Resident memory over time",
        "CPU use over time",
        "KV memory over time",
        "KV fragmentation over time",
    ):
        assert text.count(f"<figcaption><b>{title}</b>") == 2, title
    assert text.count("<svg") == 2 * 8
    for label in ("request number", "whole request, ms", "seconds", "MB"):
        assert f">{label}</text>" in text
    assert "llama-server" in text and '<b class="good">met</b>' in text
    machine = describe_machine()
    assert machine["cpu"] in text and machine["python"] in text
    assert "prefers-color-scheme: dark" in text


def test_every_plot_says_what_it_shows() -> None:
    drawn = list(plots_of(http_result(1)))
    assert len(drawn) == 8 and all(plot.caption.endswith(".") for plot in drawn)


def test_one_request_has_no_percentile_curve() -> None:
    answers = [make_answer(0.0, 0.1, 0.2)]
    samples = [Sample(1.0, 90.0, 300.0, None, None, None, None)]
    assert list(plots_of(result_of([Run(OURS, 0, {"s": 1.0}, answers=answers, samples=samples)]))) == []


def test_numbers_stand_on_the_right() -> None:
    rows = [["paged", "1,024", "<= 4 ms", "3.1x (2..4)", "met", ""], ["slots", "-", "", "", "", ""]]
    assert Table(rows, list("abcdef")).numbers == [False, True, True, True, False, False]
    assert Table([], ["a", "b"]).numbers == [False, False]


def test_columns_in_which_nothing_stands_are_left_out() -> None:
    table = without_empty_columns([["total", "1 s", "", ""], ["gap", "", "", "met"]], ["", "cLLM", "ratio", "verdict"])
    assert table == Table([["total", "1 s", ""], ["gap", "", "met"]], ["", "cLLM", "verdict"])
    assert without_empty_columns([], ["a"]) == Table([], ["a"])


def test_a_page_of_a_run_without_figures() -> None:
    text = page_of(result_of([Run(OURS, 0, {}, partial="it did not start")]))
    assert "it did not start" in text and "<svg" not in text


def test_the_page_says_what_went_wrong_and_escapes_what_it_shows(tmp_path: Path) -> None:
    runs = [Run(OURS, 0, {"s": 1.0}, partial="<b>gone</b>")]
    report = Report(describe_machine(), {"quick": True}, results=[result_of(runs)], interrupted=True)
    report.failures["micro"] = "no <room>"
    text = write_report(report, tmp_path / "deep" / "page").read_text(encoding="utf-8")
    assert "&lt;b&gt;gone&lt;/b&gt;" in text and "no &lt;room&gt;" in text and "<b>gone" not in text
    assert "was interrupted" in text and "Small sizes" in text
