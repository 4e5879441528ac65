"""What a person sees of a benchmark: the table, the live view, the page and its plots."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench_kit import make_answer
from cllm.bench.figures import OURS, Curve, Figure, Run, Swept, own, summarise, times_the_peer
from cllm.bench.live import LiveView, figures
from cllm.bench.machine import describe_machine
from cllm.bench.measures import Targets, measure, with_common
from cllm.bench.page.html import render, write_page
from cllm.bench.page.plots import thin
from cllm.bench.page.svg import Axis, Bar, Series, bar_plot, line_plot, linear_ticks, log_ticks, tick_text
from cllm.bench.report import Report, Result, number, print_result
from cllm.bench.watch import Sample

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
        Run(
            OURS,
            0,
            {"s": 10.0, "gap": 500.0},
            {"built_for": "CPU : AVX2 = 1 | AVX512 = 1 | ", "busy_percent_before": 60.0},
        ),
        Run(
            "llama-server",
            0,
            {"s": 50.0, "gap": 13_430.0},
            {"built_for": "CPU : AVX2 = 1 | ", "settings": "8 slots", "first_error": "it broke"},
        ),
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
    assert "built without AVX512," in text
    lines = [line for line in text.splitlines() if "total" in line or "worst gap" in line]
    assert lines[0].rstrip().endswith("  met") and lines[1].rstrip().endswith("not met")


def test_several_peers_have_a_line_each_and_figures_nobody_has_have_none() -> None:
    runs = [
        Run(OURS, 0, {"s": 10.0, "gap": 100.0}),
        Run("llama-server", 0, {"s": 50.0}),
        Run("openvino", 0, {"s": 5.0}),
    ]
    text = printed(result_of(runs, [*FIGURES, Figure("none", "unmeasured", "s")]))
    assert "unmeasured" not in text
    (first,) = [line for line in text.splitlines() if "llama-server" in line]
    (second,) = [line for line in text.splitlines() if "openvino" in line]
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
    assert "2 answers, 1 running, 1 failed" in lines[0]
    assert "first token P50 300 ms" in lines[1] and "inter-token P50 150 ms" in lines[1]
    assert lines[2] == "CPU 150 %, 321 MB resident; KV 12 MB running, 34 MB cached; 5 % fragmented"
    assert "first token -" in figures([], [])[1]


def test_the_view_draws_on_a_terminal_and_cleans_up() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with LiveView.on(console) as view:
        view.say("batch: 8 clients: cLLM, 1 of 3")
    assert "batch: 8 clients: cLLM, 1 of 3" in screen.getvalue()


# -- plots -----------------------------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 10))
def test_ticks_are_round_evenly_spread_and_within_the_range(low: float, width: float, about: int) -> None:
    ticks = linear_ticks(low, low + width, about)
    assert 1 <= len(ticks) <= 2 * about + 2
    assert all(low - width * 1e-3 <= tick <= low + width * 1.001 for tick in ticks)
    steps = [later - sooner for sooner, later in pairwise(ticks)]
    assert all(step == pytest.approx(steps[0], rel=1e-3, abs=1e-9) for step in steps)


def test_logarithmic_ticks_and_their_texts() -> None:
    assert log_ticks(1, 100) == [1, 2, 5, 10, 20, 50, 100]
    assert log_ticks(0.5, 1e6) == [1, 10, 100, 1000, 10_000, 100_000, 1_000_000]
    assert [tick_text(value) for value in (0, 0.25, 12.5, 2000, 3e6)] == ["0", "0.25", "12.5", "2,000", "3M"]


@given(st.floats(0.1, 1e3), st.floats(1.1, 1e3), st.booleans())
def test_an_axis_goes_from_end_to_end(low: float, factor: float, log: bool) -> None:
    axis = Axis(low, low * factor, 10, 200, log=log)
    assert axis(low) == pytest.approx(10) and axis(low * factor) == pytest.approx(200)
    assert 10 < axis(low * (1 + factor) / 2) < 200


def test_a_plot_names_its_axes_and_draws_every_series() -> None:
    series = [Series("ours", [(1, 5), (2, 6)], 0), Series("<peer>", [(1, 9), (2, 8)], 1, "both")]
    svg = line_plot(series, x_label="clients at once", y_label="tokens per second")
    assert "clients at once" in svg and "tokens per second" in svg
    assert svg.count("<polyline") == 2 and svg.count("<circle") == 2
    assert "&lt;peer&gt;" in svg and "<peer>" not in svg
    flat = line_plot([Series("one", [(1, 0)], 0)], x_label="x", y_label="y")
    assert "<circle" in flat and "nan" not in flat


def test_bars_show_estimates_with_their_intervals() -> None:
    svg = bar_plot([Bar("batch", 2.0, 1.5, 2.5, 1, "2.00x")], x_label="times better", reference=1.0)
    assert "batch" in svg and "2.00x" in svg and "times better" in svg and 'class="reference"' in svg
    (low, high) = re.findall(r'class="whisker s1" x1="([\d.]+)" [^>]*x2="([\d.]+)"', svg)[0]
    (middle,) = re.findall(r'<circle class="dot s1" cx="([\d.]+)"', svg)
    assert float(low) < float(middle) < float(high)


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
        answers = [make_answer(at, *(at + factor * (n + 1) / 10 for n in range(5))) for at in (0.0, 1.0, 2.0)]
        kv = (3.0, 9.0, 2, 4.0) if side == OURS else (None, None, None, None)
        samples = [Sample(float(second), 90.0, 300.0 + second, *kv) for second in range(4)]
        metrics = measure(answers, samples, Targets())
        return Run(side, repeat, metrics, {}, answers, samples)

    runs = [run(side, factor, repeat) for repeat in (0, 1) for side, factor in ((OURS, 1.0), ("llama-server", 2.0))]
    figures = with_common([Figure("tokens_per_s", "tokens out", "tok/s", "higher", times_the_peer(1.1))])
    rows = summarise(figures, runs)
    title = f"batch: {clients} clients"
    swept = Swept("330 tokens in", clients)
    return Result("batch", title, "cLLM", figures, runs, rows, "tokens_per_s", f"batch, {clients}", swept)


def page_of(*results: Result, **settings: object) -> str:
    report = Report(describe_machine(), {"model": "smollm2", **settings}, results=list(results))
    text = render(report)
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
        assert text.count(f"<figcaption>{title}</figcaption>") == 2, title
    for title in ("Throughput against concurrency: 330 tokens in", "Beside the peers"):
        assert text.count(f"<figcaption>{title}</figcaption>") == 1, title
    assert text.count("<svg") == 2 * 8 + 2
    for label in ("request number", "whole request, ms", "clients at once", "tokens out per second", "seconds", "MB"):
        assert f">{label}</text>" in text
    assert "against llama-server" in text and 'class="met">met' in text
    machine = describe_machine()
    assert machine["cpu"] in text and machine["python"] in text
    assert "prefers-color-scheme: dark" in text


def test_the_page_draws_what_a_workload_asks_for_and_only_what_there_is() -> None:
    curve = Curve("How long a read takes", "snapshots", "reading threads", "ms", [(1, 0.5), (32, 0.7)])
    other = Curve("How long a read takes", "one lock", "reading threads", "ms", [(1, 20), (32, 60)])
    runs = [Run(OURS, 0, {"s": 1.0}, curves=[curve]), Run("one lock", 0, {"s": 2.0}, curves=[other])]
    text = page_of(result_of(runs))
    assert text.count("<svg") == 1 and "reading threads" in text and text.count("<polyline") == 2
    assert page_of(result_of([Run(OURS, 0, {"s": 1.0})])).count("<svg") == 0


def test_the_page_says_what_went_wrong_and_escapes_what_it_shows(tmp_path: Path) -> None:
    runs = [Run(OURS, 0, {"s": 1.0}, partial="<b>gone</b>")]
    report = Report(describe_machine(), {"quick": True}, results=[result_of(runs)], interrupted=True)
    report.failures["micro"] = "no <room>"
    text = write_page(report, tmp_path / "deep" / "page").read_text(encoding="utf-8")
    assert "&lt;b&gt;gone&lt;/b&gt;" in text and "no &lt;room&gt;" in text and "<b>gone" not in text
    assert "was interrupted" in text and "Small sizes" in text
