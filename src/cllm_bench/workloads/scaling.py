"""cLLM's engine by number of threads, compared with the machine's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from cllm.machine import default_threads, read_cpus
from cllm.models.gguf import GGUFModel
from cllm_bench.errors import BenchError
from cllm_bench.figures import Figure, Run
from cllm_bench.kernels.shapes import file_macs_per_token, file_read_per_token
from cllm_bench.kernels.works import SCALING_WORKS, Work
from cllm_bench.machine import busy_percent
from cllm_bench.servers import start_runner
from cllm_bench.workloads.base import Keep, Setup, Workload

LIMIT_S = 0.25
"""How long each limit of the machine is measured in a turn."""
QUICK_LIMIT_S = 0.02
INT8, READ = "grouped_int8_macs_per_s", "model_read_bytes_per_s"
_NOTE = (
    "tokens/s, medians, in brackets beside the default number of threads; share: of the limit with as many threads "
    "(prefill: int8 multiply-adds with scales, 1 stream: memory read)"
)


def choose_works(keys: Sequence[str]) -> tuple[Work, ...]:
    known = {work.key: work for work in SCALING_WORKS}
    if unknown := set(keys) - set(known):
        raise BenchError(f"--only is {', '.join(sorted(unknown))}; by threads it must be one of {', '.join(known)}")
    return tuple(work for key, work in known.items() if not keys or key in keys)


@dataclass(frozen=True)
class Scaling(Workload):
    """Thread counts take turns, in an order that changes with the repeat, so that a slow spell of the machine hits all
    alike. Each turn has a process of its own: weights lie where the threads that read them first touched them.
    """

    model: Path
    works: tuple[Work, ...]
    threads: Sequence[int]
    """The default number of threads is measured, too."""
    instruction_set: str = "auto"
    limit_s: float = LIMIT_S

    name = "kernels"
    figures = ()

    @property
    def title(self) -> str:
        return f"{self.model.stem}: the engine by number of threads"

    @property
    def by_side(self) -> str:
        return _side(default_threads(read_cpus()).count)

    def quick(self) -> Scaling:
        return replace(self, works=tuple(work.quick() for work in self.works), limit_s=QUICK_LIMIT_S)

    @property
    def all_figures(self) -> list[Figure]:
        figures = []
        for work in self.works:
            label = work.label.removeprefix("decode, ")
            figures.append(Figure(work.key, label, "tok/s", "higher"))
            figures.append(Figure(f"{work.key}-share", f"{label}: share", "", "higher", format=".2f", compared=False))
        return figures

    async def measure(self, setup: Setup, keep: Keep) -> None:
        counts = sorted({*self.threads, default_threads(read_cpus()).count})
        runs: list[Run] = []
        for repeat in range(setup.repeats):
            for index in range(len(counts)):
                threads = counts[(index + repeat) % len(counts)]
                setup.view.say(f"{self.model.stem}: {_side(threads)}, {repeat + 1} of {setup.repeats}")
                runs.append(await self._turn(threads, repeat))
                keep(runs[-1])
        keep(Run(self.by_side, 0, {}, {"notes": [_NOTE, self._worst(runs)]}))

    async def _turn(self, threads: int, repeat: int) -> Run:
        model = GGUFModel.open(self.model)
        facts = {"busy_percent_before": busy_percent()}
        wanted = {"engine": "native", "model": str(self.model), "threads": threads}
        wanted["instruction_set"] = self.instruction_set
        async with start_runner(f"{self.model.stem} with {_side(threads)}", "kernels", wanted) as engine:
            limits = await engine.ask(do="limits", seconds=self.limit_s)
            metrics = {what: float(limits[what]) for what in (INT8, READ)}
            for work in self.works:
                answer = await engine.ask(do="speed", work=asdict(work), variant={})
                speed = metrics[work.key] = float(answer["tokens_per_s"])
                # Prompts are held against the multiply-adds that the CPUs can do, one stream against the memory it
                # reads weights from (its K/V do not count). Several streams share what is read: they have no limit.
                if not work.steps:
                    metrics[f"{work.key}-share"] = speed * file_macs_per_token(model) / limits[INT8]
                elif work.streams == 1:
                    metrics[f"{work.key}-share"] = speed * file_read_per_token(model) / limits[READ]
            return Run(_side(threads), repeat, metrics, facts | engine.ready)

    def _worst(self, runs: Sequence[Run]) -> str:
        default = {work.key: _of_best(runs, work.key)[self.by_side] for work in self.works}
        worst = min(default, key=lambda key: default[key])
        return f"the default, {self.by_side}: at least {default[worst]:.0%} of the best row ({worst})"


def _side(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _of_best(runs: Sequence[Run], key: str) -> dict[str, float]:
    """The median speeds by side, as shares of the best one."""
    values: dict[str, list[float]] = {}
    for run in runs:
        values.setdefault(run.side, []).append(run.metrics[key])
    speeds = {side: median(each) for side, each in values.items()}
    return {side: speed / max(speeds.values()) for side, speed in speeds.items()}
