"""`cllm bench kernels`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cllm.machine import default_threads, read_cpus
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.observe.json_option import JsonOption, only_json
from cllm_bench.errors import BenchError
from cllm_bench.kernels.shapes import DEFAULT_MIX, MIXES, SHAPES, pick
from cllm_bench.kernels.works import SECTIONS, SMOLLM2, SOME, parse_threads, plan_for
from cllm_bench.machine import describe_machine
from cllm_bench.options import InstructionSet, Quick, check_instruction_sets
from cllm_bench.pages.extras import check_extra
from cllm_bench.report import Report
from cllm_bench.run import run_and_report
from cllm_bench.workloads.base import Setup, Workload
from cllm_bench.workloads.kernels import Kernels
from cllm_bench.workloads.scaling import Scaling, choose_works

DEFAULT_MODEL = "smollm2"
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PART",
        help=f"Measure only this; may be repeated. One of {', '.join(SECTIONS)}; by threads also {SOME.key}.",
    ),
]
Against = Annotated[str | None, typer.Option(metavar="PEERS", help="all or none. [default: all; --quick: none]")]
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
Profile = Annotated[bool, typer.Option("--profile", help="Also show where the time of a pass goes.")]


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
    quick: Quick = False,
    profile: Profile = False,
) -> None:
    """The engine without a server, compared with other engines and with the machine's limits.

    The default model gets every figure; any other model, or random weights of a real shape, the main ones against
    llama.cpp on the same file, far into a text too if its layers have windows or states. Several numbers of --threads:
    cLLM alone, with each of them.
    """
    counts = parse_threads(threads) if threads is not None else [default_threads(read_cpus()).count]
    shapes = shape or []
    _check(only or (), against, model, counts, shapes, type, profile=profile)
    check_instruction_sets([instruction_set])
    check_extra("scipy", "cllm bench")
    files = [_random_file(name, type) for name in shapes] or [resolve(model or DEFAULT_MODEL)]
    chosen = SMOLLM2 if not shapes and model in (None, DEFAULT_MODEL) else plan_for(GGUFModel.open(files[0]))
    plan = chosen.including(only or ())
    setup = Setup(
        model=model or DEFAULT_MODEL,
        encode=str.encode,
        threads=counts[0],
        repeats=1 if quick else repeats or plan.repeats,
    )
    workloads: list[Workload]
    if len(counts) > 1:
        works = choose_works(only or ())
        workloads = [Scaling(file, works, counts, instruction_set) for file in files]
    else:
        sections = frozenset(only or plan.sections)
        peers = (against or ("none" if quick else "all")) == "all"
        workloads = [Kernels(plan, files[0], instruction_set, beside_peers=peers, sections=sections, profile=profile)]
    settings = {
        "model": None if shapes else setup.model,
        "shapes": shapes or None,
        "type": (type or DEFAULT_MIX) if shapes else None,
        "threads": counts,
        "repeats": setup.repeats,
        "against": against,
        "instruction_set": instruction_set,
        "only": only,
        "quick": quick,
    }
    report = Report(describe_machine(), settings, json)
    raise typer.Exit(run_and_report([each.quick() for each in workloads] if quick else workloads, setup, report))


def _check(
    only: Sequence[str],
    against: str | None,
    model: str | None,
    threads: Sequence[int],
    shapes: Sequence[str],
    type_name: str | None,
    *,
    profile: bool,
) -> None:
    if against not in (None, "all", "none"):
        raise BenchError(f"--against is {against!r}; it must be all or none")
    for name in shapes:
        pick(name, type_name or DEFAULT_MIX)
    if shapes and model is not None:
        raise BenchError("--shape and --model exclude each other")
    if type_name is not None and not shapes:
        raise BenchError(f"--type needs --shape, such as --shape 1B --type {type_name}")
    if len(threads) > 1:
        if against == "all" or profile:
            raise BenchError("--against and --profile cannot be combined with several numbers of --threads")
    elif len(shapes) > 1:
        raise BenchError("several --shape need several numbers of --threads; against peers, give one at a time")
    elif unknown := set(only) - set(SECTIONS):
        raise BenchError(f"--only is {', '.join(sorted(unknown))}; it must be one of {', '.join(SECTIONS)}")


def _random_file(shape: str, type_name: str | None) -> Path:
    from cllm_bench.random_model import random_file

    return random_file(shape, type_name or DEFAULT_MIX, partial(print, file=sys.stderr, flush=True))
