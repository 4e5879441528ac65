"""One call of `cllm bench`: from options to results."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from rich.console import Console
from rich.table import Table

from cllm.bench.client import BenchError
from cllm.bench.figures import Run
from cllm.bench.peers import LLAMA_SERVER, require_llama_server
from cllm.bench.prompts import Encode
from cllm.bench.report import Report, Result, number, print_result
from cllm.bench.workloads.base import HttpWorkload, Setup, Workload
from cllm.errors import CLLMError
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.text.tokenizer import load_tokenizer

_ADDRESS = "such as http://127.0.0.1:8000"


def make_setup(
    workloads: Sequence[Workload],
    *,
    model: str,
    threads: int,
    repeats: int,
    backend: str,
    url: str | None,
    against: str,
    progress: Callable[[str], None],
) -> Setup:
    """Everything checked before the first server starts."""
    if against == "llama-server":
        if any(workload.over_http for workload in workloads):
            require_llama_server()
    elif against != "none" and "://" not in against:
        raise BenchError(f"--against is {against!r}; it must be llama-server, none or an address ({_ADDRESS})")
    if url is not None and "://" not in url:
        raise BenchError(f"--url is {url!r}; it must be an address ({_ADDRESS})")
    remembers = url is not None or "://" in against
    return Setup(
        model=model,
        encode=_encoder(model, backend, workloads),
        threads=threads,
        repeats=repeats,
        backend=backend,
        url=url,
        against=None if against == "none" else against,
        # A server that ran before must not know this run's prompts from the last one.
        salt=secrets.token_hex(4) if remembers else "",
        progress=progress,
    )


async def run_all(workloads: Sequence[Workload], setup: Setup, report: Report, console: Console) -> None:
    """One after another. A workload that fails is reported, and the others still run."""
    for workload in workloads:
        try:
            runs = await workload.measure(setup)
        except CLLMError as error:
            report.failures[workload.title] = str(error)
            console.print("failed:", f"{workload.title}: {error}", style="red", markup=False, highlight=False)
        else:
            driven, peer = setup.url or "cLLM", workload.peer_name(setup)
            result = Result(workload.name, workload.title, driven, peer, workload.figures, runs)
            report.results.append(result)
            print_result(console, result)
        report.save()


async def tune_peer(workloads: Sequence[Workload], setup: Setup, console: Console) -> None:
    """Measure the peer alone under every setting that might be its best for the work."""
    require_llama_server()
    for workload in workloads:
        if not isinstance(workload, HttpWorkload):
            continue
        table = Table(title=workload.title, title_justify="left")
        table.add_column("llama-server's settings")
        for figure in workload.figures:
            table.add_column(f"{figure.label}, {figure.unit}".rstrip(", "), justify="right")
        for settings in LLAMA_SERVER[workload.peer_key]:
            setup.progress(f"{workload.title}: {settings}")
            candidate = replace(setup, against="llama-server", peer_settings=settings)
            runs = [await workload.one_pass(candidate, "peer", repeat) for repeat in range(setup.repeats)]
            table.add_row(str(settings), *(_median_of(runs, figure.key) for figure in workload.figures))
        console.print(table)


def _median_of(runs: Sequence[Run], key: str) -> str:
    return number(median(run.metrics[key] for run in runs))


def _encoder(model: str, backend: str, workloads: Sequence[Workload]) -> Encode:
    """The model's tokenizer. The fake backend's tokens are bytes, and some work needs none at all."""
    if backend == "fake" or not any(workload.needs_model for workload in workloads):
        return str.encode
    return load_tokenizer(GGUFModel.open(resolve(model))).encode
