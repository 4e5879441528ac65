"""What `cllm simulate` does: traces, policies and variations from its options, one simulation after another."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cllm.errors import ConfigError
from cllm.observe.json_option import check_writable, write_json
from cllm_bench.pages.plots import save_plots
from cllm_bench.simulate.cluster import OnProgress, simulate
from cllm_bench.simulate.cost import CostModel, load_cost
from cllm_bench.simulate.files import FileTrace
from cllm_bench.simulate.knees import describe_knees
from cllm_bench.simulate.page import sections, write_report
from cllm_bench.simulate.report import print_results, to_json
from cllm_bench.simulate.results import Result, traces_of
from cllm_bench.simulate.settings import Settings, Value, changed, grid, parse_sweep, parse_value
from cllm_bench.simulate.synthetic import KINDS, SyntheticTrace, parse_shape
from cllm_bench.simulate.traces import Trace

DEFAULT_REQUESTS = 2000
DEFAULT_RATE = 1.0
_REFRESH_S = 0.2
_FIGURES = "results.json"


@dataclass(frozen=True)
class TraceSource:
    """A trace by its description, so that a sweep can vary the rate."""

    file: Path | None
    synthetic: str | None
    requests: int | None
    rate: float | None
    shape: str
    hash_tokens: int
    seed: int
    per_replica: bool = False
    """Whether `requests` and `rate` are those of one replica."""

    def open(self, rate: float | None = None, replicas: int = 1) -> Trace:
        """The trace for so many replicas, at another rate if one is given."""
        rate = self.rate if rate is None else rate
        if rate is not None and not 0 < rate < float("inf"):
            raise ConfigError(f"--rate {rate:g}: it must be a number above 0")
        times = replicas if self.per_replica else 1
        if self.file is not None:
            if self.synthetic is not None or self.shape:
                raise ConfigError("--trace gives the requests; omit --synthetic and --shape")
            requests = None if self.requests is None else self.requests * times
            rate = None if rate is None else rate * times
            return FileTrace(self.file, requests=requests, rate=rate, hash_tokens=self.hash_tokens)
        kind = self.synthetic or "chats"
        if kind not in KINDS:
            raise ConfigError(f"--synthetic {kind}: it must be one of {', '.join(KINDS)}")
        requests, rate = (self.requests or DEFAULT_REQUESTS) * times, (rate or DEFAULT_RATE) * times
        return SyntheticTrace(kind, requests, rate, parse_shape(kind, self.shape), self.seed)


@dataclass(frozen=True)
class Outputs:
    json: Path | None
    plot: Path | None
    report: Path | None

    def check(self) -> None:
        """Before the first simulation: that everything can be written."""
        check_writable("--plot", self.plot)
        check_writable("--report", self.report and self.report / _FIGURES)

    def write(self, results: Sequence[Result], cost: CostModel) -> None:
        """Figures, after every simulation, so that nothing is lost."""
        if self.json is not None:
            write_json(self.json, to_json(results, cost))
        if self.report is not None:
            write_json(self.report / _FIGURES, to_json(results, cost))

    def draw(self, results: Sequence[Result], cost: CostModel) -> list[Path]:
        """Plots, at the end; the files that were written."""
        if self.plot is None and self.report is None:
            return []
        plots = [section.plots for section in sections(results) if section.plots]
        heading = f"{traces_of(results)}; cost model {results[0].cost}"
        written = []
        if self.plot is not None:
            written.append(save_plots(plots[0] if plots else [], self.plot, heading))
        if self.report is not None:
            for number, each in enumerate(plots, 1):
                save_plots(each, self.report / f"plot-{number}.png", heading)
            written.append(write_report(results, cost, self.report))
        return written


def parse_sweeps(texts: Sequence[str]) -> dict[str, list[Value]]:
    sweeps: dict[str, list[Value]] = {}
    for text in texts:
        key, values = parse_sweep(text, _sweep_value)
        if key in sweeps:
            raise ConfigError(f"--what-if varies {key} twice")
        sweeps[key] = values
    return sweeps


def _sweep_value(key: str, text: str) -> Value:
    if key != "rate":
        return parse_value(key, text)
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"rate={text}: it must be a number above 0") from error


def run_grid(
    source: TraceSource,
    base: Settings,
    policies: Sequence[str],
    what_if: Sequence[str],
    cost_name: str,
    outputs: Outputs,
) -> bool:
    """Every policy in every variation. False if it was interrupted; what there is was shown and written."""
    outputs.check()
    cost = load_cost(cost_name)
    sweeps = parse_sweeps(what_if)
    names = [str(parse_value("policy", name)) for name in policies] or [base.policy]
    console = Console()
    results: list[Result] = []
    interrupted = False
    open_trace = lru_cache(source.open)
    try:
        for varied in grid(sweeps):
            rate, replicas = varied.get("rate"), varied.get("replicas", base.replicas)
            trace = open_trace(None if rate is None else float(rate), int(replicas))
            for name in ["" if "policy" in varied else name for name in names]:
                settings = changed(base, {**({"policy": name} if name else {}), **varied})
                label = " ".join([settings.policy, *(f"{key}={value}" for key, value in varied.items())])
                with _progress(console, label, trace.requests) as on_progress:
                    result = simulate(trace, settings, cost, varied=varied, on_progress=on_progress)
                results.append(result)
                outputs.write(results, cost)
                if result.interrupted:
                    raise KeyboardInterrupt
                if name == "":
                    break
    except KeyboardInterrupt:
        interrupted = True
    print_results(console, results)
    for sentence in describe_knees(results):
        console.print(sentence, highlight=False, soft_wrap=True)
    if results:
        for file in outputs.draw(results, cost):
            console.print(f"written: {file}")
    return not interrupted


@contextmanager
def _progress(console: Console, label: str, requests: int) -> Iterator[OnProgress]:
    """A line that lives while a simulation runs."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(label, total=requests, speed="")
        started = last = time.perf_counter()

        def on_progress(arrived: int, tokens: int, seconds: float) -> None:
            nonlocal last
            now = time.perf_counter()
            if now - last >= _REFRESH_S:
                last = now
                speed = f"{tokens / (now - started):,.0f} tokens/s, {seconds / 3600:,.1f} h simulated"
                progress.update(task, completed=arrived, speed=speed)

        yield on_progress
