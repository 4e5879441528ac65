"""`cllm bench WORKLOAD`: measure cLLM, with peers beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer

from cllm.cli.command_list import CommandList
from cllm.config import load_config, parse_assignment
from cllm.machine import default_threads, read_cpus
from cllm.observe.json_option import JsonOption, only_json
from cllm_bench.errors import BenchError
from cllm_bench.kernels.cli import kernels
from cllm_bench.kernels.shapes import DEFAULT_MIX, SHAPES
from cllm_bench.machine import describe_machine
from cllm_bench.options import Model, Quick, ReportDir, Threads
from cllm_bench.pages.extras import check_extra
from cllm_bench.quality.cli import kv_types, truth
from cllm_bench.report import Report
from cllm_bench.run import check_addresses, make_setup, run_and_report
from cllm_bench.sizes import describe, resize
from cllm_bench.workloads import LONG, ONCE, SHORT, WORKLOADS
from cllm_bench.workloads.base import Setup, Workload


class WorkloadList(CommandList):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        super().format_commands(ctx, formatter)
        options = self.commands["all"].get_params(ctx)
        with formatter.section(f"Options of all but {', '.join(_WITH_OPTIONS_OF_THEIR_OWN)}"):
            formatter.write_dl([record for option in options if (record := option.get_help_record(ctx))])


_WITH_OPTIONS_OF_THEIR_OWN = ("kernels", "kv-types", "truth")

app = typer.Typer(
    cls=WorkloadList,
    help="Measure cLLM and its peers on the same work, in the same run.",
    epilog="`cllm bench WORKLOAD --help` also lists the sizes of a workload, for --size.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(kernels)
app.command()(kv_types)
app.command()(truth)

_PEERS_HELP = "A peer: llama-server, the address of a server, or none. May be repeated."

Url = Annotated[
    str | None, typer.Option(metavar="URL", help="Benchmark the server at this address instead of starting cLLM.")
]
ApiKey = Annotated[str | None, typer.Option(metavar="KEY", help="API key for --url.")]
Against = Annotated[
    list[str] | None,
    typer.Option(metavar="PEER", help=f"{_PEERS_HELP} [default: llama-server; --quick: none]"),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help=f"Passes per side, in turn. [default: 3; --quick, all, {', '.join(ONCE)}: 1]"
    ),
]
Backend = Annotated[str, typer.Option(metavar="NAME", help="cLLM's backend: auto, native, llama_cpp, torch or fake.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of cLLM, as in `cllm serve`; may be repeated."),
]
Shape = Annotated[
    str | None,
    typer.Option(metavar="NAME", help=f"Random weights as {DEFAULT_MIX} instead of a model: {', '.join(SHAPES)}."),
]
Size = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE,…", help="A size of the workload; several values make a sweep. May be repeated."),
]


def _add_command(name: str, help_text: str) -> None:
    @only_json
    def command(
        url: Url = None,
        api_key: ApiKey = None,
        against: Against = None,
        repeats: Repeats = None,
        model: Model = "smollm2",
        shape: Shape = None,
        threads: Threads = None,
        backend: Backend = "auto",
        assignments: Set = None,
        size: Size = None,
        json: JsonOption = None,
        report: ReportDir = None,
        quick: Quick = False,
    ) -> None:
        check_extra("scipy", "cllm bench")
        workloads = _choose(name, driven=url is not None, quick=quick, sizes=size or ())
        if shape is not None:
            from cllm_bench.random_model import random_file

            model = str(random_file(shape, DEFAULT_MIX, partial(print, file=sys.stderr, flush=True)))
        setup = make_setup(
            workloads,
            model=model,
            threads=threads or default_threads(read_cpus()).count,
            repeats=repeats or (1 if quick or name in ("all", *ONCE) else 3),
            backend=backend,
            settings=_settings(assignments or (), model, backend),
            url=url,
            api_key=api_key,
            against=against or (["none"] if quick else ["llama-server"]),
        )
        check_addresses(setup)
        written = Report(describe_machine(), _described(name, setup, quick), json, report)
        raise typer.Exit(run_and_report(workloads, setup, written))

    app.command(name, help=help_text)(command)


def _choose(name: str, *, driven: bool, quick: bool, sizes: Sequence[str]) -> list[Workload]:
    workloads = list(SHORT if name == "all" else WORKLOADS[name])
    if driven:
        workloads = [workload for workload in workloads if workload.over_http]
        if not workloads:
            raise BenchError(f"{name} does not drive a server; omit --url")
    if quick:
        workloads = list(dict.fromkeys(workload.quick() for workload in workloads))  # one size of each is enough
    if sizes:
        workloads = resize(workloads, sizes)
    return workloads


def _settings(assignments: Sequence[str], model: str, backend: str) -> dict[str, Any]:
    """`--set`, checked as the server would."""
    settings = dict(parse_assignment(text) for text in assignments)
    load_config(None, {**settings, "model.name": model, "backend.type": backend})
    return settings


def _described(name: str, setup: Setup, quick: bool) -> dict[str, Any]:
    """The settings of this run, kept with its figures."""
    return {
        "workload": name,
        "model": setup.model,
        "threads": setup.threads,
        "repeats": setup.repeats,
        "backend": setup.backend,
        "settings": dict(setup.settings),
        "url": setup.url,
        "against": list(setup.against),
        "quick": quick,
    }


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
