"""One call of `cllm bench`: from options to results."""

from __future__ import annotations

import asyncio
import secrets
import signal
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from cllm.errors import CLLMError
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.observe.json_option import goes_to_stdout
from cllm.text.tokenizer import load_tokenizer
from cllm_bench.client import Client
from cllm_bench.figures import OURS, Run, summarise
from cllm_bench.http import Address
from cllm_bench.live import View
from cllm_bench.peers import LLAMA_SERVER, check
from cllm_bench.prompts import Encode
from cllm_bench.report import QUICK, Report, Result, print_machine, print_result
from cllm_bench.workloads.base import PartsFailedError, Setup, Workload

INTERRUPTED = 130


def make_setup(
    workloads: Sequence[Workload],
    *,
    model: str,
    threads: int,
    repeats: int,
    backend: str = "auto",
    settings: Mapping[str, Any] | None = None,
    url: str | None = None,
    api_key: str | None = None,
    against: Sequence[str] = (),
) -> Setup:
    """Everything checked before the first server starts."""
    over_http = any(workload.over_http for workload in workloads)
    peers = check(against, must_run=over_http)
    addresses = [address for address in (url, *peers) if address not in (None, LLAMA_SERVER)]
    for address in addresses:
        Address(address)
    return Setup(
        model=model,
        encode=_encoder(model, backend, workloads),
        threads=threads,
        repeats=repeats,
        backend=backend,
        settings=settings or {},
        url=url,
        api_key=api_key,
        against=peers if over_http else (),
        # A server that ran before must not know this run's prompts from the last one.
        salt=secrets.token_hex(4) if addresses else "",
    )


def check_addresses(setup: Setup) -> None:
    """A server that was given by its address must answer before anything is measured."""
    keys = {peer: None for peer in setup.against if peer != LLAMA_SERVER}
    given = keys if setup.url is None else {**keys, setup.url: setup.api_key}

    async def check_all() -> None:
        for url, key in given.items():
            async with Client(url, api_key=key):
                pass

    if given:
        asyncio.run(check_all())


def run_and_report(workloads: Sequence[Workload], setup: Setup, report: Report) -> int:
    """Measure with what a user sees around it: progress, tables, files. The exit code."""
    console = _console()
    report.save()  # if it cannot be written, that is better known now
    print_machine(console, report.machine)
    if report.settings.get("quick"):
        console.print(QUICK)
    seen = replace(setup, view=View(Console(stderr=True)))
    if not _run(run_all(workloads, seen, report, console)):
        report.interrupted = True
    for file in report.save():
        if not goes_to_stdout(file):
            console.print(f"written: {file}", highlight=False, soft_wrap=True)
    if report.interrupted:
        Console(stderr=True).print("interrupted; the results so far are shown above")
        return INTERRUPTED
    return 0 if report.ok else 1


async def run_all(workloads: Sequence[Workload], setup: Setup, report: Report, console: Console) -> None:
    """One after another. A workload that fails is reported, and the others still run; what was measured is saved."""
    for workload in workloads:
        runs: list[Run] = []
        judged = not report.settings.get("quick")
        try:
            await workload.measure(setup, runs.append)
        except CLLMError as error:
            reasons = error.reasons if isinstance(error, PartsFailedError) else {workload.title: str(error)}
            report.failures.update(reasons)
            for part, reason in reasons.items():
                console.print("failed:", f"{part}: {reason}", style="red", markup=False, highlight=False)
        except (asyncio.CancelledError, KeyboardInterrupt):
            report.interrupted = True
            raise
        finally:
            if runs:
                report.results.append(make_result(workload, setup, runs, judged=judged))
            report.save()
            if runs:
                print_result(console, report.results[-1])


def make_result(workload: Workload, setup: Setup, runs: Sequence[Run], *, judged: bool = True) -> Result:
    """`judged`: with what must be reached, and whether it is. llama.cpp's arithmetic need not beat its own server."""
    figures = workload.all_figures
    if not judged or any(run.side == OURS and run.facts.get("backend") == "llama_cpp" for run in runs):
        figures = [replace(figure, limit=None) for figure in figures]
    return Result(
        workload.name,
        workload.title,
        setup.shown(OURS),
        figures,
        runs,
        summarise(figures, runs),
        by_side=workload.by_side,
    )


def _encoder(model: str, backend: str, workloads: Sequence[Workload]) -> Encode:
    """The model's tokenizer. The fake backend's tokens are bytes, and some work needs none at all."""
    if backend == "fake" or not any(workload.needs_model for workload in workloads):
        return str.encode
    return load_tokenizer(GGUFModel.open(resolve(model))).encode


def _console() -> Console:
    """Where no terminal sets a width, tables get the one they need."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


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
