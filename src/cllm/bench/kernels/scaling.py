"""cLLM's engine by number of threads, beside what the machine can do with as many.

    cllm bench kernels --threads 1,2,4,8,16
    python -m cllm.bench.kernels.scaling --shape 1B --threads 1,2,4,8,16 --json scaling.json

The second form needs numpy and the extension only. `--load scaling.json --plot scaling.png` prints and draws elsewhere
what was measured.

Thread counts take turns, in an order that changes with the repeat, so that a slow spell of the machine hits all alike.
Each turn builds its engine anew: weights lie where the threads that read them first touched them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

from cllm._native import Engine
from cllm.bench.http import BenchError
from cllm.bench.json_file import check_writable
from cllm.bench.kernels.blocks import BlockStreams
from cllm.bench.kernels.limits import machine_limits, read_bytes
from cllm.bench.kernels.scaling_plot import check as check_plot
from cllm.bench.kernels.scaling_plot import draw
from cllm.bench.kernels.scaling_report import Scaling, load, save, table
from cllm.bench.kernels.shapes import DEFAULT_MIX, MIXES, SHAPES, pick, random_engine, weight_bytes
from cllm.bench.kernels.streams import fill, tokens_per_s
from cllm.bench.kernels.works import SCALING_WORKS, Work, parse_threads, usual_counts
from cllm.bench.machine import busy_percent
from cllm.errors import CLLMError
from cllm.machine import default_threads, mib, read_cpus, read_rooms, tightest

LIMIT_S = 0.25
"""How long each limit of the machine is measured in a turn."""
QUICK_LIMIT_S = 0.02
INTERRUPTED = 130
INT8, READ = "grouped_int8_macs_per_s", "model_read_bytes_per_s"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured."""

    name: str
    build: Callable[[int], Engine]
    """An engine with so many threads."""
    n_vocab: int
    macs_per_token: float
    read_per_token: float
    """Bytes of weights: of a file packed, of random ones as a file would store them."""


def random_subject(name: str, type_name: str, instruction_set: str) -> Subject:
    shape, mix = pick(name, type_name)
    size = weight_bytes(shape, mix)
    _check_room(f"{name} as {type_name}", size, "take a smaller shape")
    build = partial(random_engine, shape, mix, instruction_set=instruction_set)
    return Subject(f"{name} {type_name}, random", build, shape.n_vocab, shape.macs_per_token, size)


def _check_room(what: str, size: int, advice: str) -> None:
    taken, room = size + read_bytes(size), tightest(read_rooms())
    if taken > room.free:
        raise BenchError(f"{what} takes {mib(taken)}, more than {room}; {advice}")


def file_subject(name: str, instruction_set: str) -> Subject:
    """A model's own weights."""
    from cllm.backends.native.loader import load_engine  # these need more than numpy
    from cllm.backends.native.sizes import packed_bytes, read_per_token
    from cllm.bench.kernels.run import macs_per_token
    from cllm.models.gguf import GGUFModel
    from cllm.models.registry import resolve

    file = resolve(name)
    model = GGUFModel.open(file)
    _check_room(str(file), packed_bytes(model), "give a smaller model")

    def build(threads: int) -> Engine:
        return load_engine(model, threads=threads, instruction_set=instruction_set)

    return Subject(file.stem, build, model.shape.n_vocab, macs_per_token(model), float(read_per_token(model)))


def choose_works(keys: Sequence[str], quick: bool) -> list[Work]:
    known = {work.key: work for work in SCALING_WORKS}
    if unknown := set(keys) - set(known):
        raise BenchError(f"--only is {', '.join(sorted(unknown))}; by threads it must be one of {', '.join(known)}")
    return [work.quick() if quick else work for key, work in known.items() if not keys or key in keys]


def measure(
    subject: Subject,
    works: Sequence[Work],
    counts: Sequence[int],
    *,
    repeats: int,
    limit_s: float = LIMIT_S,
    progress: Callable[[str], None] = lambda line: None,
) -> Scaling:
    """The default number of threads is always among those measured. An interrupt ends it early."""
    default = default_threads(read_cpus()).count
    counts = sorted({*counts, default})
    found = Scaling(subject.name, [work.key for work in works], default)
    turns = [
        (repeat, counts[(index + repeat) % len(counts)]) for repeat in range(repeats) for index in range(len(counts))
    ]
    try:
        for repeat, threads in turns:
            found.busy_percent = max(found.busy_percent, _busy())
            start = perf_counter()
            _turn(subject, works, threads, limit_s, found)
            seconds = perf_counter() - start
            progress(f"{subject.name}: {threads} threads, {repeat + 1} of {repeats}: {seconds:.1f} s")
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def _busy() -> float:
    try:
        return busy_percent()
    except ImportError:  # without psutil nobody knows
        return 0.0


def _turn(subject: Subject, works: Sequence[Work], threads: int, limit_s: float, found: Scaling) -> None:
    try:
        engine = subject.build(threads)
        found.instruction_set, found.weight_bytes = engine.instruction_set, engine.weight_bytes
        limits = machine_limits(engine, limit_s)
        for what in (INT8, READ):
            found.limits.setdefault(threads, {}).setdefault(what, []).append(limits[what])
        for work in works:
            streams = BlockStreams(engine, subject.n_vocab, work.streams, work.room)
            fill(streams, work, subject.n_vocab)
            speed = tokens_per_s(streams, work, subject.n_vocab)
            found.speeds.setdefault(threads, {}).setdefault(work.key, []).append(speed)
            share = _share(subject, work, speed, limits)
            if share is not None:
                found.shares.setdefault(threads, {}).setdefault(work.key, []).append(share)
    except (ValueError, MemoryError) as error:
        raise BenchError(f"{subject.name} with {threads} threads: {error or 'out of memory'}") from error


def _share(subject: Subject, work: Work, speed: float, limits: Mapping[str, float]) -> float | None:
    """Prompts are held against the multiply-adds that the CPUs can do, one stream against the memory it reads weights
    from (its K/V, which is read as well, does not count). Several streams share what is read, so they have no limit."""
    if not work.steps:
        return speed * subject.macs_per_token / limits[INT8]
    return speed * subject.read_per_token / limits[READ] if work.streams == 1 else None


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for."""

    threads: Sequence[int] = ()
    """None: powers of two."""
    shapes: Sequence[str] = ()
    """None: the model."""
    type: str = DEFAULT_MIX
    """Of the shapes."""
    model: str = ""
    only: Sequence[str] = ()
    repeats: int = 3
    instruction_set: str = "auto"
    quick: bool = False
    json: Path | None = None
    plot: Path | None = None


def run(request: Request) -> int:
    """Measure, print and write. The exit code."""
    if request.plot is not None:
        check_plot(request.plot)
    if request.json is not None:
        check_writable(request.json)
    works = choose_works(request.only, request.quick)
    if request.shapes:
        subjects = [random_subject(name, request.type, request.instruction_set) for name in request.shapes]
    else:
        subjects = [file_subject(request.model, request.instruction_set)]
    results: list[Scaling] = []
    for subject in subjects:
        found = measure(
            *(subject, works, request.threads or usual_counts()),
            repeats=1 if request.quick else request.repeats,
            limit_s=QUICK_LIMIT_S if request.quick else LIMIT_S,
            progress=_say,
        )
        results.append(found)
        if found.interrupted:
            break
    return _show(results, request)


def _show(results: Sequence[Scaling], request: Request) -> int:
    for found in results:
        print(table(found), end="\n\n", flush=True)
    if request.quick:
        print("small sizes: the figures above do not count")
    if request.json is not None:
        save(request.json, asdict(replace(request, json=None, plot=None)), results)
    if request.plot is not None:
        draw(results, request.plot)
    return INTERRUPTED if any(found.interrupted for found in results) else 0


def _say(line: str) -> None:
    # No spinner: its thread would take turns with those that are measured.
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    try:
        request = Request(
            threads=parse_threads(asked.threads) if asked.threads else (),
            shapes=asked.shape.split(","),
            type=asked.type,
            only=asked.only.split(",") if asked.only else (),
            repeats=asked.repeats,
            instruction_set=asked.instruction_set,
            quick=asked.quick,
            json=asked.json,
            plot=asked.plot,
        )
        return run(request) if asked.load is None else _show(load(asked.load), request)
    except CLLMError as error:
        _say(f"scaling: {error}")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cllm.bench.kernels.scaling", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", default="135M", help=f"one or several of {', '.join(SHAPES)}, with commas between")
    parser.add_argument("--type", default=DEFAULT_MIX, help=f"one of {', '.join(MIXES)}")
    parser.add_argument("--threads", help="such as 1,2,4,8,16; the default number is added")
    parser.add_argument("--only", help=f"some of {','.join(work.key for work in SCALING_WORKS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--instruction-set", default="auto", help="auto, amx, avx512, avxvnni, avx2 or generic")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs, not for figures")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    parser.add_argument("--plot", type=Path, help="draw it: .png, .svg or .pdf (needs matplotlib)")
    parser.add_argument("--load", type=Path, help="measure nothing: take a file that --json wrote")
    return parser


if __name__ == "__main__":
    sys.exit(main())
