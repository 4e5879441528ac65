"""`cllm bench kernels`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cllm.machine import default_threads, read_cpus
from cllm.models.registry import resolve
from cllm.observe.json_option import JsonOption, only_json
from cllm_bench.errors import BenchError
from cllm_bench.kernels.shapes import DEFAULT_MIX, MIXES, SHAPES, pick
from cllm_bench.kernels.works import ANY_MODEL, SECTIONS, SMOLLM2, SOME, Plan, parse_threads
from cllm_bench.machine import describe_machine
from cllm_bench.options import InstructionSet, Quick, check_instruction_sets
from cllm_bench.page import plots_of
from cllm_bench.pages.extras import check_extra, check_plot
from cllm_bench.pages.plots import save_plots
from cllm_bench.report import Report
from cllm_bench.run import run_and_report
from cllm_bench.workloads.base import Setup
from cllm_bench.workloads.kernels import Kernels

DEFAULT_MODEL = "smollm2"
PEERS = {
    "all": frozenset({"llama", "genai"}),
    "llama": frozenset({"llama"}),
    "genai": frozenset({"genai"}),
    "none": frozenset[str](),
}

Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PART",
        help=f"Measure only this; may be repeated. One of {', '.join(SECTIONS)}; by threads also {SOME.key}.",
    ),
]
Against = Annotated[
    str | None, typer.Option(metavar="PEERS", help=f"Peers: {', '.join(PEERS)}. [default: all; --quick: none]")
]
Repeats = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help=f"Passes per side, in turn. [default: {SMOLLM2.repeats}, or fewer]"),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help=f"A known name, a .gguf file or hf:org/repo/file.gguf. [default: {DEFAULT_MODEL}]"
    ),
]
Threads = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N...]",
        help="Threads per side; several numbers: cLLM alone, with each. [default: as many as `cllm serve` uses]",
    ),
]
ShapeName = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME",
        help=f"Random weights instead of a model: {', '.join(SHAPES)}. With several --threads it may be repeated.",
    ),
]
Type = Annotated[
    str | None,
    typer.Option(metavar="TYPE", help=f"Weight type of --shape: {', '.join(MIXES)}. [default: {DEFAULT_MIX}]"),
]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE", callback=check_plot, help="With several --threads: draw them as .png, .svg or .pdf."
    ),
]
Profile = Annotated[bool, typer.Option("--profile", help="Also show where the time of a pass goes.")]


@dataclass(frozen=True)
class Options:
    """What the user wants."""

    only: Sequence[str]
    against: str
    repeats: int | None
    model: str | None
    threads: Sequence[int]
    shapes: Sequence[str]
    type: str | None
    instruction_set: str
    json: Path | None
    plot: Path | None
    quick: bool
    profile: bool

    @property
    def by_threads(self) -> bool:
        return len(self.threads) > 1

    @property
    def plan(self) -> Plan:
        """The default model has one of its own; any work may be requested by name."""
        own = not self.shapes and self.model in (None, DEFAULT_MODEL)
        plan, other = (SMOLLM2, ANY_MODEL) if own else (ANY_MODEL, SMOLLM2)
        return plan.borrow(self.only, other)

    @property
    def compared(self) -> set[str]:
        """The engines that the requested works are compared with."""
        wanted = self.only or self.plan.sections
        return {each.peer.engine for each in self.plan.comparisons if each.work.key in wanted}


@only_json
def kernels(
    only: Only = None,
    against: Against = None,
    repeats: Repeats = None,
    model: Model = None,
    threads: Threads = None,
    shape: ShapeName = None,
    type: Type = None,
    instruction_set: InstructionSet = "auto",
    json: JsonOption = None,
    plot: PlotFile = None,
    quick: Quick = False,
    profile: Profile = False,
) -> None:
    """The engine without a server, compared with other engines and with the machine's limits.

    The default model gets every figure; any other model, or random weights of a real shape, the main ones against
    llama.cpp on the same file. Several numbers of --threads: cLLM alone, with each of them.
    """
    counts = parse_threads(threads) if threads is not None else []
    peers = against or ("none" if quick else "all")
    options = Options(
        *(only or (), peers, repeats, model, counts, shape or (), type, instruction_set, json, plot, quick, profile)
    )
    _check(options)
    check_instruction_sets([instruction_set])
    check_extra("scipy", "cllm bench")
    raise typer.Exit(_by_threads(options) if options.by_threads else _beside_peers(options))


def _check(options: Options) -> None:
    if options.against not in PEERS:
        raise BenchError(f"--against is {options.against!r}; it must be one of {', '.join(PEERS)}")
    for name in options.shapes:
        pick(name, options.type or DEFAULT_MIX)
    if options.shapes and options.model is not None:
        raise BenchError("--shape and --model exclude each other")
    if options.type is not None and not options.shapes:
        raise BenchError(f"--type needs --shape, such as --shape 1B --type {options.type}")
    if options.by_threads:
        if options.against not in ("all", "none") or options.profile:
            raise BenchError("--against and --profile cannot be combined with several numbers of --threads")
    elif options.plot is not None:
        raise BenchError("--plot needs several numbers of --threads, such as 1,2,4")
    elif len(options.shapes) > 1:
        raise BenchError("several --shape need several numbers of --threads; against peers, give one at a time")
    elif unknown := set(options.only) - set(SECTIONS):
        raise BenchError(f"--only is {', '.join(sorted(unknown))}; it must be one of {', '.join(SECTIONS)}")
    elif options.against not in ("all", "none", *options.compared):
        works = dict.fromkeys(
            each.work.key
            for each in (*SMOLLM2.comparisons, *ANY_MODEL.comparisons)
            if each.peer.engine == options.against
        )
        raise BenchError(
            f"--against is {options.against}, but nothing that would be measured is compared with it; "
            f"give --only with one of {', '.join(works)}"
        )


def _by_threads(options: Options) -> int:
    from cllm_bench.workloads.scaling import Scaling, choose_works, file_subject, random_subject  # need the extension

    works, kind = choose_works(options.only), options.type or DEFAULT_MIX
    subjects = [random_subject(name, kind, options.instruction_set) for name in options.shapes]
    subjects = subjects or [file_subject(options.model or DEFAULT_MODEL, options.instruction_set)]
    workloads = [Scaling(subject, works, options.threads) for subject in subjects]
    repeats = options.repeats or SMOLLM2.repeats
    settings: dict[str, Any] = {
        "threads": options.threads,
        "shapes": options.shapes,
        "type": kind,
        "model": options.model or DEFAULT_MODEL,
        "only": options.only,
        "repeats": repeats,
        "instruction_set": options.instruction_set,
        "quick": options.quick,
    }
    report = Report(describe_machine(), settings, options.json)
    setup = Setup(
        model=options.model or DEFAULT_MODEL, encode=str.encode, threads=0, repeats=1 if options.quick else repeats
    )
    code = run_and_report([each.quick() for each in workloads] if options.quick else workloads, setup, report)
    if options.plot is not None:
        save_plots([plot for result in report.results for plot in plots_of(result)], options.plot)
    return code


def _beside_peers(options: Options) -> int:
    plan, file = options.plan, _file(options)
    workload = Kernels(
        plan,
        file,
        options.instruction_set,
        engines=PEERS[options.against],
        sections=frozenset(options.only or plan.sections),
        profile=options.profile,
        small=options.quick,
    )
    setup = Setup(
        model=str(file),
        encode=str.encode,
        threads=options.threads[0] if options.threads else default_threads(read_cpus()).count,
        repeats=1 if options.quick else options.repeats or plan.repeats,
    )
    return run_and_report([workload], setup, Report(describe_machine(), _settings(options, setup), options.json))


def _file(options: Options) -> Path:
    if not options.shapes:
        return resolve(options.model or DEFAULT_MODEL)
    from cllm_bench.random_model import random_file

    return random_file(options.shapes[0], options.type or DEFAULT_MIX, partial(print, file=sys.stderr, flush=True))


def _settings(options: Options, setup: Setup) -> dict[str, Any]:
    """The settings of this run, kept with its figures."""
    shape = {"shape": options.shapes[0], "type": options.type or DEFAULT_MIX} if options.shapes else {}
    return {
        "model": options.model or (None if options.shapes else DEFAULT_MODEL),
        "file": setup.model,
        **shape,
        "threads": setup.threads,
        "repeats": setup.repeats,
        "against": options.against,
        "instruction_set": options.instruction_set,
        "only": list(options.only) or None,
        "quick": options.quick,
    }
