"""`cllm bench WORKLOAD`: measure cLLM, with a peer beside it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cllm.bench.machine import describe_machine, physical_cores
from cllm.bench.report import Report, print_machine
from cllm.bench.run import make_setup, run_all, tune_peer
from cllm.bench.workloads import WORKLOADS
from cllm.errors import CLLMError

app = typer.Typer(
    help="Measure cLLM beside a peer, on the same work in the same run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Url = Annotated[str | None, typer.Option(help="Drive the server at this address instead of starting cLLM.")]
Against = Annotated[str, typer.Option(help="The peer: llama-server, the address of a server, or none.")]
Repeats = Annotated[int | None, typer.Option(min=1, help="Passes of each side, in turn. [default: 3; all: 1]")]
Model = Annotated[str, typer.Option(help="A known name, a .gguf file or hf:org/repo/file.gguf.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of each side. [default: one per physical core]")]
Backend = Annotated[str, typer.Option(help="cLLM's backend.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all that was measured to this file.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes: to see that it runs, not for figures.")]
Tune = Annotated[bool, typer.Option("--tune", help="Only try llama-server's settings for this work.")]


def _add_command(name: str, help_text: str) -> None:
    def command(
        url: Url = None,
        against: Against = "llama-server",
        repeats: Repeats = None,
        model: Model = "smollm2",
        threads: Threads = None,
        backend: Backend = "auto",
        json: Json = None,
        quick: Quick = False,
        tune: Tune = False,
    ) -> None:
        names = list(WORKLOADS) if name == "all" else [name]
        if not _bench(names, url, against, repeats, model, threads, backend, json, quick, tune):
            raise typer.Exit(1)

    app.command(name, help=help_text)(command)


def _bench(
    names: list[str],
    url: str | None,
    against: str,
    repeats: int | None,
    model: str,
    threads: int | None,
    backend: str,
    json: Path | None,
    quick: bool,
    tune: bool,
) -> bool:
    """Whether all went well."""
    console = Console()
    workloads = [workload for name in names for workload in WORKLOADS[name]]
    if url is not None:
        workloads = [workload for workload in workloads if workload.over_http]
        if not workloads:
            raise CLLMError(f"{names[0]} does not drive a server: leave --url out")
    if quick:
        workloads = [workload.quick() for workload in workloads]
    with console.status("starting") as status:
        setup = make_setup(
            workloads,
            model=model,
            threads=threads or physical_cores(),
            repeats=repeats or (1 if len(names) > 1 else 3),
            backend=backend,
            url=url,
            against=against,
            progress=status.update,
        )
        if tune:
            asyncio.run(tune_peer(workloads, setup, console))
            return True
        settings = {"model": model, "threads": setup.threads, "repeats": setup.repeats, "backend": backend}
        report = Report(describe_machine(), {**settings, "url": url, "against": against, "quick": quick}, json)
        print_machine(console, report.machine)
        if quick:
            console.print("small sizes: the verdicts below do not count")
        asyncio.run(run_all(workloads, setup, report, console))
    return not report.failures


for _name, _workloads in WORKLOADS.items():
    # A workload's file begins with the question it answers.
    _add_command(_name, sys.modules[type(_workloads[0]).__module__].__doc__ or "")
_add_command("all", "Every workload, once: the figures of the README.")
