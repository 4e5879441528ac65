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
from cllm.observe.json_option import write_json
from cllm_bench.simulate.cluster import OnProgress, simulate
from cllm_bench.simulate.cost import load_cost
from cllm_bench.simulate.files import FileTrace
from cllm_bench.simulate.report import print_results, to_json
from cllm_bench.simulate.results import Result
from cllm_bench.simulate.settings import Settings, Value, changed, grid, parse_sweep, parse_value
from cllm_bench.simulate.synthetic import KINDS, SyntheticTrace, parse_shape
from cllm_bench.simulate.traces import Trace

DEFAULT_REQUESTS = 2000
DEFAULT_RATE = 1.0
_REFRESH_S = 0.2


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
    what_if: Sequence[str],
    cost_name: str,
    json_file: Path | None,
    report: Path | None = None,
) -> bool:
    """Every variation. False if it was interrupted; what there is was shown and written."""
    cost = load_cost(cost_name)
    console = Console()
    results: list[Result] = []
    open_trace = lru_cache(source.open)
    variations = grid(parse_sweeps(what_if))
    for varied in variations:
        rate, replicas = varied.get("rate"), varied.get("replicas", base.replicas)
        try:
            trace = open_trace(None if rate is None else float(rate), int(replicas))
            settings = changed(base, varied)
            label = " ".join(f"{key}={value}" for key, value in varied.items()) or trace.name
            with _progress(console, label, trace.requests) as on_progress:
                results.append(simulate(trace, settings, cost, varied=varied, on_progress=on_progress))
        except KeyboardInterrupt:
            break
        if json_file is not None:  # after every simulation, so that nothing is lost
            write_json(json_file, to_json(results, cost))
        if results[-1].interrupted:
            break
    print_results(console, results)
    if report is not None and results:
        from cllm_bench.simulate.page import write_results

        console.print(f"{write_results(results, cost, report)}", highlight=False, soft_wrap=True)
    return len(results) == len(variations) and not any(result.interrupted for result in results)


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
