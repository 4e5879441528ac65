"""`cllm bench WORKLOAD`: measure cLLM, with peers beside it."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from cllm.bench.http import BenchError
from cllm.bench.kernels.cli import kernels
from cllm.bench.kv_types.cli import kv_types
from cllm.bench.live import LiveView, PlainView, View
from cllm.bench.machine import describe_machine
from cllm.bench.measures import Targets
from cllm.bench.report import Report, print_machine
from cllm.bench.run import make_setup, run_all, tune_peers
from cllm.bench.sizes import describe, last, resize
from cllm.bench.truth.cli import truth
from cllm.bench.workloads import LONG, ONCE, SHORT, WORKLOADS
from cllm.bench.workloads.base import Setup, Workload
from cllm.config import load_config, parse_assignment
from cllm.machine import default_threads, read_cpus
from cllm.only_json import goes_to_stdout, only_json

INTERRUPTED = 130

app = typer.Typer(
    help="Measure cLLM beside its peers, on the same work in the same run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(kernels)
app.command()(kv_types)
app.command()(truth)

_PEERS_HELP = "A peer: llama-server, openvino, llama-cpp-python, the address of a server, or none. May be repeated."

Url = Annotated[str | None, typer.Option(help="Drive the server at this address instead of starting cLLM.")]
ApiKey = Annotated[str | None, typer.Option(help="Key for --url.")]
Against = Annotated[list[str] | None, typer.Option(help=f"{_PEERS_HELP} [default: llama-server; soak: none]")]
Repeats = Annotated[
    int | None,
    typer.Option(min=1, help=f"Passes of each side, in turn. [default: 3; all, {', '.join(ONCE)}: 1]"),
]
Model = Annotated[str, typer.Option(help="A known name, a .gguf file or hf:org/repo/file.gguf.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of each side. [default: those that `cllm serve` takes]")
]
Backend = Annotated[str, typer.Option(help="cLLM's backend.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of cLLM; may be repeated.")
]
Size = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE,…", help="A size of the work; several values are swept. May be repeated."),
]
Duration = Annotated[str | None, typer.Option(help="How long people come, in mixed and soak: 90s, 30m, 2h.")]
TtftTarget = Annotated[float, typer.Option(min=0, help="Goodput: most milliseconds to the first token.")]
InterTokenTarget = Annotated[float, typer.Option(min=0, help="Goodput: most milliseconds between tokens, on average.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all that was measured to this file (- is stdout).")]
ReportDir = Annotated[Path | None, typer.Option("--report", help="Write a page with plots into this directory.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes: to see that it runs, not for figures.")]
Tune = Annotated[bool, typer.Option("--tune", help="Only try the peers' settings for this work.")]


@dataclass(frozen=True)
class Options:
    url: str | None
    api_key: str | None
    against: Sequence[str]
    repeats: int | None
    model: str
    threads: int | None
    backend: str
    assignments: Sequence[str]
    sizes: Sequence[str]
    duration: str | None
    targets: Targets
    json: Path | None
    report: Path | None
    quick: bool
    tune: bool


def _add_command(name: str, help_text: str) -> None:
    @only_json
    def command(
        url: Url = None,
        api_key: ApiKey = None,
        against: Against = None,
        repeats: Repeats = None,
        model: Model = "smollm2",
        threads: Threads = None,
        backend: Backend = "auto",
        assignments: Set = None,
        size: Size = None,
        duration: Duration = None,
        ttft_target_ms: TtftTarget = 1000.0,
        inter_token_target_ms: InterTokenTarget = 100.0,
        json: Json = None,
        report: ReportDir = None,
        quick: Quick = False,
        tune: Tune = False,
    ) -> None:
        peers = against or (["none"] if name == "soak" else ["llama-server"])
        targets = Targets(ttft_target_ms, inter_token_target_ms)
        options = Options(
            *(url, api_key, peers, repeats, model, threads, backend, assignments or (), size or (), duration),
            *(targets, json, report, quick, tune),
        )
        raise typer.Exit(_bench(name, options))

    app.command(name, help=help_text)(command)


def _bench(name: str, options: Options) -> int:
    """The exit code."""
    workloads = _choose(name, options)
    repeats = options.repeats or (1 if name in ("all", *ONCE) else 3)
    setup = make_setup(
        workloads,
        model=options.model,
        threads=options.threads or default_threads(read_cpus()).count,
        repeats=repeats,
        backend=options.backend,
        settings=_settings(options),
        url=options.url,
        api_key=options.api_key,
        against=options.against,
        targets=options.targets,
    )
    console = _console()
    report = Report(describe_machine(), _described(name, setup, options), options.json, options.report)
    report.save()  # if it cannot be written, that is better known now
    print_machine(console, report.machine)
    if options.quick:
        console.print("small sizes: the verdicts below do not count")
    with _view(console) as view:
        seen = replace(setup, view=view)
        work = tune_peers(workloads, seen, console) if options.tune else run_all(workloads, seen, report, console)
        if not _run(work):
            report.interrupted = True
    for file in report.save():
        if not goes_to_stdout(file):
            console.print(f"written: {file}", highlight=False, soft_wrap=True)
    if report.interrupted:
        Console(stderr=True).print("interrupted: what was measured until then stands above")
        return INTERRUPTED
    return 0 if report.ok else 1


def _choose(name: str, options: Options) -> list[Workload]:
    workloads = list(SHORT if name == "all" else WORKLOADS[name])
    if options.url is not None:
        workloads = [workload for workload in workloads if workload.over_http]
        if not workloads:
            raise BenchError(f"{name} does not drive a server: leave --url out")
    if options.quick:
        workloads = [workload.quick() for workload in workloads]
    if options.sizes:
        workloads = resize(workloads, options.sizes)
    if options.duration is not None:
        workloads = last(workloads, options.duration)
    return workloads


def _settings(options: Options) -> dict[str, Any]:
    """`--set`, checked as the server would."""
    settings = dict(parse_assignment(text) for text in options.assignments)
    load_config(None, {**settings, "model.name": options.model, "backend.type": options.backend})
    return settings


def _described(name: str, setup: Setup, options: Options) -> dict[str, Any]:
    """What was asked for, for whoever reads the figures later."""
    return {
        "workload": name,
        "model": setup.model,
        "threads": setup.threads,
        "repeats": setup.repeats,
        "backend": setup.backend,
        "settings": dict(setup.settings),
        "url": setup.url,
        "against": list(setup.against),
        "goodput": str(setup.targets),
        "quick": options.quick,
    }


def _console() -> Console:
    """Where no terminal sets a width, tables get the one they need."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


@contextmanager
def _view(console: Console) -> Iterator[View]:
    if console.is_terminal:
        with LiveView.on(console) as view:
            yield view
    else:
        yield PlainView(Console(stderr=True))


def _run(work: Coroutine[Any, Any, None]) -> bool:
    """Run the coroutine to its end; False if the user had enough. Everything it started is then closed, too."""
    with _interruptible():
        try:
            asyncio.run(work)
        except KeyboardInterrupt:
            return False
    return True


@contextmanager
def _interruptible() -> Iterator[None]:
    """The first Ctrl-C ends the work wherever it is; others are ignored while servers are stopped and files written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _help(workloads: Sequence[Workload]) -> str:
    """A workload's file begins with the question it answers."""
    question = sys.modules[type(workloads[0]).__module__].__doc__ or ""
    return f"{question}\n\nSizes: {describe(workloads[0])}."


for _name, _workloads in WORKLOADS.items():
    _add_command(_name, _help(_workloads))
_add_command(
    "all",
    f"The short set: every workload but {', '.join(LONG)}, kernels, kv-types and truth, once, in under ten minutes.",
)
