"""cLLM's engine by number of threads, compared with the machine's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from cllm._native import Engine
from cllm.backends.native.loader import load_engine
from cllm.backends.native.sizes import packed_bytes, read_per_token
from cllm.machine import default_threads, mib, read_cpus, read_memory_limits, tightest
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm_bench.errors import BenchError
from cllm_bench.figures import Curve, Figure, Run
from cllm_bench.kernels.blocks import BlockStreams
from cllm_bench.kernels.limits import machine_limits, read_bytes
from cllm_bench.kernels.shapes import file_macs_per_token, pick, random_engine, weight_bytes
from cllm_bench.kernels.streams import fill, tokens_per_s
from cllm_bench.kernels.works import SCALING_WORKS, Work
from cllm_bench.machine import busy_percent
from cllm_bench.report import Result, markdown
from cllm_bench.workloads.base import Keep, Setup, Workload

LIMIT_S = 0.25
"""How long each limit of the machine is measured in a turn."""
QUICK_LIMIT_S = 0.02
INT8, READ = "grouped_int8_macs_per_s", "model_read_bytes_per_s"
_NOTE = (
    "tokens/s, medians, in brackets beside the default number of threads; share: of the limit with as many threads "
    "(prefill: int8 multiply-adds with scales, 1 stream: memory read)"
)
_SHARES = "How near each work comes to its limit: int8 multiply-adds with scales (prefill), memory read (1 stream)."


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


def file_subject(name: str, instruction_set: str) -> Subject:
    """A model's own weights."""
    file = resolve(name)
    model = GGUFModel.open(file)
    _check_room(str(file), packed_bytes(model), "give a smaller model")

    def build(threads: int) -> Engine:
        return load_engine(model, threads=threads, instruction_set=instruction_set)

    return Subject(file.stem, build, model.spec.n_vocab, file_macs_per_token(model), float(read_per_token(model)))


def _check_room(what: str, size: int, advice: str) -> None:
    taken, room = size + read_bytes(size), tightest(read_memory_limits())
    if taken > room.free:
        raise BenchError(f"{what} takes {mib(taken)}, more than {room}; {advice}")


def choose_works(keys: Sequence[str]) -> tuple[Work, ...]:
    known = {work.key: work for work in SCALING_WORKS}
    if unknown := set(keys) - set(known):
        raise BenchError(f"--only is {', '.join(sorted(unknown))}; by threads it must be one of {', '.join(known)}")
    return tuple(work for key, work in known.items() if not keys or key in keys)


@dataclass(frozen=True)
class Scaling(Workload):
    """Thread counts take turns, in an order that changes with the repeat, so that a slow spell of the machine hits all
    alike. Each turn builds its engine anew: weights lie where the threads that read them first touched them.
    """

    subject: Subject
    works: tuple[Work, ...]
    threads: Sequence[int]
    """The default number of threads is measured, too."""
    limit_s: float = LIMIT_S

    name = "kernels"
    figures = ()

    @property
    def title(self) -> str:
        return f"{self.subject.name}: the engine by number of threads"

    @property
    def label(self) -> str:
        return self.subject.name

    @property
    def default(self) -> int:
        return default_threads(read_cpus()).count

    @property
    def by_side(self) -> str:
        return _side(self.default)

    def quick(self) -> Scaling:
        return replace(self, works=tuple(work.quick() for work in self.works), limit_s=QUICK_LIMIT_S)

    @property
    def all_figures(self) -> list[Figure]:
        figures = []
        for work in self.works:
            label = work.label.removeprefix("decode, ")
            figures.append(Figure(work.key, label, "tok/s", "higher"))
            figures.append(Figure(_share(work.key), f"{label}: share", "", "higher", format=".2f", compared=False))
        return figures

    async def measure(self, setup: Setup, keep: Keep) -> None:
        counts = sorted({*self.threads, self.default})
        runs: list[Run] = []
        for repeat in range(setup.repeats):
            for index in range(len(counts)):
                threads = counts[(index + repeat) % len(counts)]
                setup.view.say(f"{self.subject.name}: {_side(threads)}, {repeat + 1} of {setup.repeats}")
                busy = busy_percent()
                metrics, facts = self._turn(threads)
                runs.append(Run(_side(threads), repeat, metrics, facts | {"busy_percent_before": busy}))
                keep(runs[-1])
        keep(Run(self.by_side, 0, {}, {"notes": self._notes(runs)}, curves=list(self._curves(runs, counts))))

    def _turn(self, threads: int) -> tuple[dict[str, float], dict[str, Any]]:
        subject = self.subject
        try:
            engine = subject.build(threads)
            limits = machine_limits(engine, self.limit_s)
            metrics = {what: limits[what] for what in (INT8, READ)}
            for work in self.works:
                streams = BlockStreams(engine, subject.n_vocab, work.streams, work.room)
                fill(streams, work, subject.n_vocab)
                speed = metrics[work.key] = tokens_per_s(streams, work, subject.n_vocab)
                # Prompts are held against the multiply-adds that the CPUs can do, one stream against the memory it
                # reads weights from (its K/V do not count). Several streams share what is read: they have no limit.
                if not work.steps:
                    metrics[_share(work.key)] = speed * subject.macs_per_token / limits[INT8]
                elif work.streams == 1:
                    metrics[_share(work.key)] = speed * subject.read_per_token / limits[READ]
        except (ValueError, MemoryError) as error:
            raise BenchError(f"{subject.name} with {threads} threads: {error or 'out of memory'}") from error
        return metrics, {"instruction_set": engine.instruction_set, "weight_bytes": engine.weight_bytes}

    def _notes(self, runs: Sequence[Run]) -> list[str]:
        facts = runs[0].facts
        default = {work.key: _of_best(runs, work.key)[self.by_side] for work in self.works}
        worst = min(default, key=lambda key: default[key])
        return [
            f"{facts['weight_bytes'] / 1e9:.2f} GB of weights, {facts['instruction_set']}",
            _NOTE,
            f"the default, {self.by_side}: at least {default[worst]:.0%} of the best row ({worst})",
        ]

    def _curves(self, runs: Sequence[Run], counts: Sequence[int]) -> Iterator[Curve]:
        marks = {float(self.default): f"default {self.default}"}
        for work in self.works:
            label, speeds = work.label.removeprefix("decode, "), _of_best(runs, work.key)
            points = [(float(count), speeds[_side(count)]) for count in counts]
            title, caption = (
                f"{self.subject.name}: speed",
                "Tokens per second, as a share of the best number of threads.",
            )
            yield Curve(title, label, "threads", "share of the best", points, caption, marks)
            shares = _medians(runs, _share(work.key))
            points = [(float(count), shares[_side(count)]) for count in counts if _side(count) in shares]
            title, caption = f"{self.subject.name}: use of the machine", _SHARES
            yield Curve(title, label, "threads", "share of the limit", points, caption, marks)

    def details(self, result: Result) -> dict[str, Any]:
        turns = [run for run in result.runs if run.metrics]

        def by_threads(keys: Mapping[str, str]) -> dict[str, dict[str, list[float]]]:
            found: dict[str, dict[str, list[float]]] = {}
            for run in turns:
                for name, key in keys.items():
                    if key in run.metrics:
                        found.setdefault(run.side.split()[0], {}).setdefault(name, []).append(run.metrics[key])
            return found

        works = [work.key for work in self.works]
        of_model = {
            "name": self.subject.name,
            "works": works,
            "default": self.default,
            "instruction_set": turns[0].facts["instruction_set"],
            "weight_bytes": turns[0].facts["weight_bytes"],
            "speeds": by_threads({key: key for key in works}),
            "shares": by_threads({key: _share(key) for key in works}),
            "limits": by_threads({key: key for key in (INT8, READ)}),
            "busy_percent": max(run.facts["busy_percent_before"] for run in turns),
            "interrupted": len(turns) == len(result.runs),
            "table": markdown(result),
        }
        return {"results": [of_model]}


def _side(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _share(work: str) -> str:
    return f"{work}-share"


def _medians(runs: Sequence[Run], key: str) -> dict[str, float]:
    """By number of threads."""
    values: dict[str, list[float]] = {}
    for run in runs:
        if key in run.metrics:
            values.setdefault(run.side, []).append(run.metrics[key])
    return {side: median(each) for side, each in values.items()}


def _of_best(runs: Sequence[Run], key: str) -> dict[str, float]:
    speeds = _medians(runs, key)
    return {side: speed / max(speeds.values()) for side, speed in speeds.items()}
