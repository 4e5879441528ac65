"""One call of `cllm bench`: from options to results."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from cllm.bench.figures import OURS, Run
from cllm.bench.http import Address
from cllm.bench.measures import Targets
from cllm.bench.peers import PEERS, check
from cllm.bench.peers.base import describe
from cllm.bench.prompts import Encode
from cllm.bench.report import Report, Result, number, print_result
from cllm.bench.required import for_backend
from cllm.bench.workloads.base import Setup, Workload
from cllm.bench.workloads.over_http import HttpWorkload
from cllm.errors import CLLMError
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.text.tokenizer import load_tokenizer


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
    targets: Targets | None = None,
) -> Setup:
    """Everything checked before the first server starts."""
    over_http = any(workload.over_http for workload in workloads)
    peers = check(against, must_run=over_http)
    addresses = [address for address in (url, *peers) if address is not None and address not in PEERS]
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
        targets=targets or Targets(),
        # A server that ran before must not know this run's prompts from the last one.
        salt=secrets.token_hex(4) if addresses else "",
    )


async def run_all(workloads: Sequence[Workload], setup: Setup, report: Report, console: Console) -> None:
    """One after another. A workload that fails is reported, and the others still run; what was measured is saved."""
    for workload in workloads:
        runs: list[Run] = []
        try:
            await workload.measure(setup, runs.append)
        except CLLMError as error:
            report.failures[workload.title] = str(error)
            console.print("failed:", f"{workload.title}: {error}", style="red", markup=False, highlight=False)
        except (asyncio.CancelledError, KeyboardInterrupt):
            report.interrupted = True
            raise
        finally:
            if runs:
                report.results.append(make_result(workload, setup, runs))
            report.save()
            if runs:
                print_result(console, report.results[-1])


def make_result(workload: Workload, setup: Setup, runs: Sequence[Run]) -> Result:
    backend = next((run.facts["backend"] for run in runs if run.side == OURS and "backend" in run.facts), None)
    figures = for_backend(backend, workload.name, workload.all_figures)
    return Result(
        workload.name,
        workload.title,
        setup.shown(OURS),
        figures,
        runs,
        workload.rows(figures, runs),
        headline=workload.headline,
        label=workload.label,
        swept=workload.swept,
    )


async def tune_peers(workloads: Sequence[Workload], setup: Setup, console: Console) -> None:
    """Measure each peer alone under every setting that might be its best for the work."""
    for workload in workloads:
        for name in setup.against:
            if isinstance(workload, HttpWorkload) and name in PEERS:
                await _tune(workload, name, setup, console)


async def _tune(workload: HttpWorkload, name: str, setup: Setup, console: Console) -> None:
    figures = workload.figures[:4]
    table = Table(title=workload.title, title_justify="left")
    table.add_column(f"settings of {name}")
    for figure in figures:
        table.add_column(f"{figure.label}, {figure.unit}".rstrip(", "), justify="right")
    for settings in PEERS[name].candidates(workload.needs):
        setup.view.say(f"{workload.title}: {name}, {describe(settings)}")
        candidate = replace(setup, peer_settings=settings)
        runs: list[Run] = []
        for repeat in range(setup.repeats):
            await workload.one_pass(candidate, name, repeat, runs.append)
        table.add_row(describe(settings), *(_median_of(runs, figure.key) for figure in figures))
    console.print(table)


def _median_of(runs: Sequence[Run], key: str) -> str:
    values = [run.metrics[key] for run in runs if key in run.metrics]
    return number(median(values)) if values else "-"


def _encoder(model: str, backend: str, workloads: Sequence[Workload]) -> Encode:
    """The model's tokenizer. The fake backend's tokens are bytes, and some work needs none at all."""
    if backend == "fake" or not any(workload.needs_model for workload in workloads):
        return str.encode
    return load_tokenizer(GGUFModel.open(resolve(model))).encode
