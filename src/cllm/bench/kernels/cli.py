"""`cllm bench kernels`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cllm.bench.http import BenchError
from cllm.bench.json_file import check_writable
from cllm.bench.kernels.run import KernelBench, Options
from cllm.bench.kernels.shapes import DEFAULT_MIX, MIXES, SHAPES, pick
from cllm.bench.kernels.table import make_lines, make_notes, print_lines, print_profiles, save
from cllm.bench.kernels.works import ANY_MODEL, SECTIONS, SMOLLM2, SOME, Plan, parse_threads
from cllm.bench.machine import describe_machine
from cllm.bench.report import print_machine
from cllm.machine import default_threads, read_cpus
from cllm.models.registry import resolve
from cllm.only_json import only_json

DEFAULT_MODEL = "smollm2"
INTERRUPTED = 130
WIDTH = 170
"""Of the table where it goes to a file."""
PEERS = {
    "all": frozenset({"llama", "genai"}),
    "llama": frozenset({"llama"}),
    "genai": frozenset({"genai"}),
    "none": frozenset[str](),
}

Only = Annotated[
    list[str] | None,
    typer.Option(help=f"Only this; may be repeated. One of {', '.join(SECTIONS)}; by threads also {SOME.key}."),
]
Against = Annotated[str, typer.Option(help=f"The peers: {', '.join(PEERS)}.")]
Repeats = Annotated[
    int | None, typer.Option(min=1, help=f"Passes of each side, in turn. [default: {SMOLLM2.repeats}, or fewer]")
]
Model = Annotated[
    str | None, typer.Option(help=f"A known name, a .gguf file or hf:org/repo/file.gguf. [default: {DEFAULT_MODEL}]")
]
Threads = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N...]",
        help="Threads of each side; several numbers: cLLM alone with each of them. [default: those `cllm serve` takes]",
    ),
]
ShapeName = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        help=f"Random weights instead of a model: {', '.join(SHAPES)}. With several --threads it may be repeated.",
    ),
]
Type = Annotated[str | None, typer.Option(help=f"Of --shape: {', '.join(MIXES)}. [default: {DEFAULT_MIX}]")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="By threads: draw it as .png, .svg or .pdf.")
]
InstructionSet = Annotated[str, typer.Option(help="cLLM's: auto, amx, avx512, avxvnni, avx2 or generic.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all that was measured to this file (- is stdout).")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes: to see that it runs, not for figures.")]
Profile = Annotated[bool, typer.Option("--profile", help="Also where the time of a pass goes.")]


@dataclass(frozen=True)
class Asked:
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
        """The default model has one of its own; any work may be asked for by name."""
        own = not self.shapes and self.model in (None, DEFAULT_MODEL)
        plan, other = (SMOLLM2, ANY_MODEL) if own else (ANY_MODEL, SMOLLM2)
        return plan.borrow(self.only, other)

    @property
    def compared(self) -> set[str]:
        """The engines that what is asked for is compared with."""
        wanted = self.only or self.plan.sections
        return {each.peer.engine for each in self.plan.comparisons if each.work.key in wanted}


@only_json
def kernels(
    only: Only = None,
    against: Against = "all",
    repeats: Repeats = None,
    model: Model = None,
    threads: Threads = None,
    shape: ShapeName = None,
    type: Type = None,
    instruction_set: InstructionSet = "auto",
    json: Json = None,
    plot: PlotFile = None,
    quick: Quick = False,
    profile: Profile = False,
) -> None:
    """The engine without a server: its speed beside other engines and beside the machine's limits.

    The default model in full; of any other model, or random weights of a real shape, the main figures beside llama.cpp
    on the same file. Several numbers of --threads: cLLM alone with each of them.
    """
    counts = parse_threads(threads) if threads is not None else []
    asked = Asked(
        *(only or (), against, repeats, model, counts, shape or (), type, instruction_set, json, plot, quick, profile)
    )
    _check(asked)
    raise typer.Exit(_by_threads(asked) if asked.by_threads else _beside_peers(asked))


def _check(asked: Asked) -> None:
    if asked.against not in PEERS:
        raise BenchError(f"--against is {asked.against!r}; it must be one of {', '.join(PEERS)}")
    for name in asked.shapes:
        pick(name, asked.type or DEFAULT_MIX)
    if asked.shapes and asked.model is not None:
        raise BenchError("--shape and --model do not go together: give one of them")
    if asked.type is not None and not asked.shapes:
        raise BenchError(f"--type goes with --shape, such as --shape 1B --type {asked.type}")
    if asked.by_threads:
        if asked.against not in ("all", "none") or asked.profile:
            raise BenchError("--against and --profile do not go with several numbers of --threads")
    elif asked.plot is not None:
        raise BenchError("--plot needs several numbers of --threads, such as 1,2,4")
    elif len(asked.shapes) > 1:
        raise BenchError("several --shape need several numbers of --threads; beside peers, give one at a time")
    elif unknown := set(asked.only) - set(SECTIONS):
        raise BenchError(f"--only is {', '.join(sorted(unknown))}; it must be one of {', '.join(SECTIONS)}")
    elif asked.against not in ("all", "none", *asked.compared):
        works = dict.fromkeys(
            each.work.key
            for each in (*SMOLLM2.comparisons, *ANY_MODEL.comparisons)
            if each.peer.engine == asked.against
        )
        raise BenchError(
            f"--against is {asked.against}, but nothing that would be measured is compared with it; "
            f"give --only with one of {', '.join(works)}"
        )
    if asked.json is not None:
        check_writable(asked.json)


def _by_threads(asked: Asked) -> int:
    from cllm.bench.kernels.scaling import Request, run  # needs the extension

    request = Request(
        threads=asked.threads,
        shapes=asked.shapes,
        type=asked.type or DEFAULT_MIX,
        model=asked.model or DEFAULT_MODEL,
        only=asked.only,
        repeats=asked.repeats or SMOLLM2.repeats,
        instruction_set=asked.instruction_set,
        quick=asked.quick,
        json=asked.json,
        plot=asked.plot,
    )
    return run(request)


def _beside_peers(asked: Asked) -> int:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    machine = describe_machine()
    print_machine(console, machine)
    with _progress(console) as progress:
        file = _file(asked, progress)
        bench = KernelBench(_options(asked, file, progress))
        interrupted = not _finished(bench)
    measured = bench.measured
    lines = [line for line in make_lines(measured) if not asked.only or line.measured]
    print_lines(console, lines, [f"model: {file}", *make_notes(measured)])
    print_profiles(console, measured.profiles)
    if asked.quick:
        console.print("small sizes: the outcomes above do not count")
    if asked.json is not None:
        save(asked.json, _settings(asked, file, bench.options), machine, measured)
    if interrupted:
        Console(stderr=True).print("interrupted: what was measured until then stands above")
    return INTERRUPTED if interrupted else 1 if measured.failures else 0


def _file(asked: Asked, progress: Callable[[str], None]) -> Path:
    if not asked.shapes:
        return resolve(asked.model or DEFAULT_MODEL)
    from cllm.bench.random_model import random_file

    return random_file(asked.shapes[0], asked.type or DEFAULT_MIX, progress)


def _options(asked: Asked, file: Path, progress: Callable[[str], None]) -> Options:
    plan = asked.plan
    return Options(
        model=file,
        threads=asked.threads[0] if asked.threads else default_threads(read_cpus()).count,
        repeats=1 if asked.quick else asked.repeats or plan.repeats,
        plan=plan,
        instruction_set=asked.instruction_set,
        engines=PEERS[asked.against],
        sections=frozenset(asked.only or plan.sections),
        quick=asked.quick,
        profile=asked.profile,
        progress=progress,
    )


def _settings(asked: Asked, file: Path, options: Options) -> dict[str, Any]:
    """What was asked for, for whoever reads the figures later."""
    shape = {"shape": asked.shapes[0], "type": asked.type or DEFAULT_MIX} if asked.shapes else {}
    model = {"model": asked.model or (None if asked.shapes else DEFAULT_MODEL), "file": str(file)}
    rest = {"threads": options.threads, "repeats": options.repeats, "against": asked.against}
    return {
        **(model | shape | rest),
        "instruction_set": asked.instruction_set,
        "only": list(asked.only) or None,
        "quick": asked.quick,
    }


def _finished(bench: KernelBench) -> bool:
    """False if the user had enough."""
    try:
        bench.run()
    except KeyboardInterrupt:
        return False
    return True


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """One line that changes, or on no terminal one after another."""
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        yield partial(print, file=sys.stderr, flush=True)
