"""`cllm bench kernels`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cllm.bench.http import BenchError
from cllm.bench.kernels.run import KernelBench, Options
from cllm.bench.kernels.shapes import SHAPES
from cllm.bench.kernels.table import make_lines, make_notes, print_lines, print_profiles, save
from cllm.bench.kernels.works import SECTIONS, SOME, parse_threads
from cllm.bench.machine import describe_machine
from cllm.bench.report import print_machine
from cllm.machine import default_threads, read_cpus
from cllm.models.registry import resolve

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
Repeats = Annotated[int, typer.Option(min=1, help="Passes of each side, in turn.")]
Model = Annotated[str, typer.Option(help="A known name, a .gguf file or hf:org/repo/file.gguf.")]
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
        "--shape", help=f"By threads, random weights instead of a model; may be repeated. One of {', '.join(SHAPES)}."
    ),
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="By threads: draw it as .png, .svg or .pdf.")
]
InstructionSet = Annotated[str, typer.Option(help="cLLM's: auto, amx, avx512, avxvnni, avx2 or generic.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all that was measured to this file.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes: to see that it runs, not for figures.")]
Profile = Annotated[bool, typer.Option("--profile", help="Also where the time of a pass goes.")]


def kernels(
    only: Only = None,
    against: Against = "all",
    repeats: Repeats = 5,
    model: Model = "smollm2",
    threads: Threads = None,
    shape: ShapeName = None,
    instruction_set: InstructionSet = "auto",
    json: Json = None,
    plot: PlotFile = None,
    quick: Quick = False,
    profile: Profile = False,
) -> None:
    """The engine without a server: its speed beside other engines and beside the machine's limits."""
    if against not in PEERS:
        raise BenchError(f"--against is {against!r}; it must be one of {', '.join(PEERS)}")
    counts = parse_threads(threads) if threads is not None else []
    if shape or len(counts) > 1:
        if against not in ("all", "none") or profile:
            raise BenchError("--against and --profile do not go with --shape or several numbers of --threads")
        from cllm.bench.kernels.scaling import Request, run  # needs the extension

        raise typer.Exit(
            run(Request(counts, shape or (), model, only or (), repeats, instruction_set, quick, json, plot))
        )
    if plot is not None:
        raise BenchError("--plot needs several numbers of --threads, such as 1,2,4")
    if unknown := set(only or ()) - set(SECTIONS):
        raise BenchError(f"--only is {', '.join(sorted(unknown))}; it must be one of {', '.join(SECTIONS)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    machine = describe_machine()
    print_machine(console, machine)
    with _progress(console) as progress:
        options = Options(
            model=resolve(model),
            threads=counts[0] if counts else default_threads(read_cpus()).count,
            repeats=1 if quick else repeats,
            instruction_set=instruction_set,
            engines=PEERS[against],
            sections=frozenset(only or SECTIONS),
            quick=quick,
            profile=profile,
            progress=progress,
        )
        bench = KernelBench(options)
        interrupted = not _finished(bench)
    measured = bench.measured
    lines = [line for line in make_lines(measured) if not only or line.measured]
    print_lines(console, lines, make_notes(measured))
    print_profiles(console, measured.profiles)
    if quick:
        console.print("small sizes: the outcomes above do not count")
    if json is not None:
        settings = {"model": model, "threads": options.threads, "repeats": options.repeats, "against": against}
        settings |= {"instruction_set": instruction_set, "only": only, "quick": quick}
        save(json, settings, machine, measured)
    if interrupted:
        Console(stderr=True).print("interrupted: what was measured until then stands above")
    if interrupted or measured.failures:
        raise typer.Exit(INTERRUPTED if interrupted else 1)


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
