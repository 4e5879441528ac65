"""The engine without a server: cLLM's own kernels compared with other engines and with the machine's limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from cllm.errors import CLLMError
from cllm.models.gguf import GGUFModel
from cllm.models.registry import cache_dir
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, Limit, Run, own
from cllm_bench.kernels.shapes import file_macs_per_token, file_read_per_token, file_weight_bytes
from cllm_bench.kernels.works import (
    FIRST_TOKEN,
    FIRST_TOKEN_S,
    MANY,
    MEMORY,
    MEMORY_OVER_MB,
    ONE_SHORT,
    PACKED_OVER_FILE,
    PREFILL,
    ROWS,
    ROWS_OVER_ONE,
    Peer,
    Plan,
    Work,
)
from cllm_bench.report import number
from cllm_bench.servers import Runner, start_runner
from cllm_bench.workloads.base import Keep, PartsFailedError, Setup, Workload, busy_at_rest

LIMIT = "the limit"
"""The side that is the machine."""
SETTLE_S = 0.2
"""Thread pools may spin for a moment after work."""
LIMIT_S = 0.25
"""How long each limit of the machine is measured in a repeat."""
QUICK_LIMIT_S = 0.05

INT8, GROUPED_INT8, READ, MODEL_READ = "int8", "grouped int8", "read", "model read"
LIMIT_NAMES = {
    "int8_macs_per_s": INT8,
    "grouped_int8_macs_per_s": GROUPED_INT8,
    "read_bytes_per_s": READ,
    "model_read_bytes_per_s": MODEL_READ,
}
_SHARES = {
    PREFILL.key: {"prefill-share": INT8, "grouped-share": GROUPED_INT8},
    ONE_SHORT.key: {"stream-share": MODEL_READ},
}
"""The works that have a limit, which is measured in turn with them."""
_OURS_PROCESS = ("native", False)


@dataclass(frozen=True)
class Kernels(Workload):
    """Engines run in processes of their own, which are started when they are first needed and stay; idle ones sleep."""

    plan: Plan
    model: Path
    instruction_set: str = "auto"
    beside_peers: bool = True
    sections: frozenset[str] = frozenset()
    """What is measured: some of the plan's."""
    profile: bool = False
    small: bool = False

    name = "kernels"
    figures = ()

    @property
    def title(self) -> str:
        return "kernels: the engine without a server"

    def quick(self) -> Kernels:
        return replace(self, small=True)

    def sized(self, work: Work) -> dict[str, Any]:
        return asdict(work.quick() if self.small else work)

    async def measure(self, setup: Setup, keep: Keep) -> None:
        async with AsyncExitStack() as processes:
            await _KernelRun(self, setup, keep, processes).run()

    @property
    def all_figures(self) -> list[Figure]:
        plan = self.plan
        figures = [_speed(plan, work) for work in plan.works]
        if ROWS in plan.works:
            label = f"a step of {ROWS.rows} tokens of 1 stream over one of 1"
            figures.append(_own("rows-over-one", label, "x", ROWS_OVER_ONE))
        figures += [
            Figure(f"{PREFILL.key}: {INT8}", "int8 multiply-adds", "GMAC/s", "higher"),
            Figure(f"{PREFILL.key}: {GROUPED_INT8}", "the same, with a scale per 32 columns", "GMAC/s", "higher"),
            Figure(f"{ONE_SHORT.key}: {READ}", "memory read, 256 MB", "GB/s", "higher"),
            Figure(f"{ONE_SHORT.key}: {MODEL_READ}", "memory read, the weights' size or 1 GiB", "GB/s", "higher"),
            _own("prefill-share", "prefill: share of int8", "", plan.prefill_share, better="higher"),
            _own("grouped-share", "prefill: share with scales", "", None, better="higher"),
            _own("stream-share", "1 stream: share of memory read", "", plan.stream_share, better="higher"),
            _own("packed-over-file", "weights in memory over in the file", "x", PACKED_OVER_FILE),
            _own(FIRST_TOKEN, "load to first token, file in page cache", "s", FIRST_TOKEN_S if plan.apart else None),
            _own(f"{FIRST_TOKEN} of process", "the same from the start of the process", "s", None),
            _own(MEMORY, "resident beyond weights and K/V in use", "MB", MEMORY_OVER_MB if plan.apart else None),
        ]
        return figures


def _own(key: str, label: str, unit: str, bound: float | None, *, better: Any = "lower") -> Figure:
    """A ratio to a peer's would mean nothing."""
    return Figure(key, label, unit, better, None if bound is None else own(bound), compared=False)


def _speed(plan: Plan, work: Work) -> Figure:
    bounds = {each.peer.label: each.times for each in plan.comparisons if each.work is work and each.times is not None}
    limit = Limit("ratio", 1.0, bounds) if bounds else None
    return Figure(work.key, work.label, "tok/s", "higher", limit)


class _KernelRun:
    """One run."""

    def __init__(self, kernels: Kernels, setup: Setup, keep: Keep, stack: AsyncExitStack) -> None:
        self._kernels = kernels
        self._setup = setup
        self._keep = keep
        self._stack = stack
        self._processes: dict[tuple[str, bool], Runner] = {}
        self._lost: set[tuple[str, bool]] = set()
        self._failures: dict[str, str] = {}
        self._speeds: dict[tuple[str, str], dict[int, float]] = {}
        """By work and side, of each repeat."""
        self._model = GGUFModel.open(kernels.model)

    async def run(self) -> None:
        wanted, plan = self._kernels.sections, self._kernels.plan
        ours = (await self._process(_OURS_PROCESS)).ready
        packed = ours["weight_bytes"] / file_weight_bytes(self._model)
        facts = {"settings": str(self._kernels.model), "engine": ours, "busy_percent_before": await busy_at_rest()}
        self._keep(Run(OURS, 0, {"packed-over-file": packed}, facts))
        parts: dict[str, tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = {
            **{work.key: (work.label, partial(self._speed_of_all, work)) for work in plan.works},
            FIRST_TOKEN: ("load to first token", self._first_tokens),
            MEMORY: ("resident memory", self._memory),
        }
        for key, (label, part) in parts.items():
            if key in wanted:
                try:
                    await part()
                except BenchError as error:
                    self._failures[label] = str(error)
        self._compare_rows()
        if self._failures:
            raise PartsFailedError(self._failures)

    async def _speed_of_all(self, work: Work) -> None:
        """Tokens a second of every side in turn; the order changes with the repeat, so that drift hits all alike."""
        peers = await self._available(self._kernels.plan.peers_of(work))
        variants = {peer.label: await self._tune(work, peer) for peer in peers.values()}
        limits: dict[int, Mapping[str, float]] = {}
        for repeat, side in self._turns([OURS, *peers, *([LIMIT] if work.key in _SHARES else [])]):
            self._say(work, side, repeat)
            if side == LIMIT:
                limits[repeat] = await self._limits(work, repeat)
                continue
            process, variant = (_OURS_PROCESS, {}) if side == OURS else (peers[side].process, variants[side])
            speed = await self._speed(process, work, variant)
            self._speeds.setdefault((work.key, side), {})[repeat] = speed
            facts = {"settings": f"{work.label}: {_described(variant)}"} if variant else {}
            self._keep(Run(side, repeat, {work.key: speed}, facts))
        self._shares(work, limits)
        if self._kernels.profile:
            phases = await self._ask(_OURS_PROCESS, "profile", work=self._kernels.sized(work))
            notes = [_profile_line(work.label, phases)]
            self._keep(Run(OURS, 0, {}, {"profile": {work.label: phases}, "notes": notes}))
        for process in {_OURS_PROCESS, *(peer.process for peer in peers.values())}:
            await self._ask(process, "forget")

    async def _tune(self, work: Work, peer: Peer) -> Mapping[str, Any]:
        """The peer's fastest settings for this work."""
        if len(peer.variants) == 1:
            return peer.variants[0]
        speeds = []
        for variant in peer.variants:
            self._setup.view.say(f"{work.label}: {peer.label}, which settings are best")
            speeds.append(await self._speed(peer.process, work, variant))
        return peer.variants[speeds.index(max(speeds))]

    async def _limits(self, work: Work, repeat: int) -> Mapping[str, float]:
        seconds = QUICK_LIMIT_S if self._kernels.small else LIMIT_S
        answer = await self._ask(_OURS_PROCESS, "limits", seconds=seconds)
        limits = {what: float(answer[name]) for name, what in LIMIT_NAMES.items()}
        self._keep(Run(LIMIT, repeat, {f"{work.key}: {what}": value / 1e9 for what, value in limits.items()}))
        return limits

    def _shares(self, work: Work, limits: Mapping[int, Mapping[str, float]]) -> None:
        """Relates ours to the machine's limits that were measured in the same repeat."""
        per_token = (file_read_per_token if work.steps else file_macs_per_token)(self._model)
        for repeat, found in limits.items():
            used = self._speeds[work.key, OURS][repeat] * per_token
            self._keep(Run(OURS, repeat, {key: used / found[what] for key, what in _SHARES[work.key].items()}))

    def _compare_rows(self) -> None:
        """How many times as long as a step of one token one of several takes."""
        for side in dict.fromkeys(side for key, side in self._speeds if key == ROWS.key):
            one, several = self._speeds.get((ONE_SHORT.key, side), {}), self._speeds[ROWS.key, side]
            for repeat in one.keys() & several.keys():
                self._keep(Run(side, repeat, {"rows-over-one": ROWS.rows * one[repeat] / several[repeat]}))

    async def _first_tokens(self) -> None:
        for repeat in range(self._setup.repeats):
            self._setup.view.say(f"load to first token, {repeat + 1} of {self._setup.repeats}")
            start = perf_counter()
            async with self._start(_OURS_PROCESS) as process:
                seconds = (await process.ask(do="first_token"))["seconds"]
                of_process = perf_counter() - start
            self._keep(Run(OURS, repeat, {FIRST_TOKEN: seconds, f"{FIRST_TOKEN} of process": of_process}))

    async def _memory(self) -> None:
        """In a process that has done nothing else."""
        async with self._start(_OURS_PROCESS) as process:
            taken = await process.ask(do="memory", work=self._kernels.sized(MANY))
        beyond = taken["resident_bytes"] - taken["weight_bytes"] - taken["kv_bytes"]
        self._keep(Run(OURS, 0, {MEMORY: beyond / 1e6}, {MEMORY: taken}))

    async def _speed(self, process: tuple[str, bool], work: Work, variant: Mapping[str, Any]) -> float:
        await asyncio.sleep(SETTLE_S)
        answer = await self._ask(process, "speed", work=self._kernels.sized(work), variant=variant)
        return float(answer["tokens_per_s"])

    def _turns(self, sides: Sequence[str]) -> list[tuple[int, str]]:
        return [
            (repeat, sides[(index + repeat) % len(sides)])
            for repeat in range(self._setup.repeats)
            for index in range(len(sides))
        ]

    async def _available(self, peers: Sequence[Peer]) -> dict[str, Peer]:
        """The peers that take part and start, by label. One that does not is left out, and the notes say why."""
        found = {}
        for peer in peers:
            if not self._kernels.beside_peers or peer.process in self._lost:
                continue
            try:
                self._keep(Run(peer.label, 0, {}, {"engine": (await self._process(peer.process)).ready}))
                found[peer.label] = peer
            except CLLMError as error:
                self._lost.add(peer.process)
                self._keep(Run(peer.label, 0, {}, {"left_out": str(error)}))
        return found

    async def _process(self, key: tuple[str, bool]) -> Runner:
        if key not in self._processes:
            self._setup.view.say(f"starting {key[0]}")
            self._processes[key] = await self._stack.enter_async_context(self._start(key))
        return self._processes[key]

    async def _ask(self, process: tuple[str, bool], do: str, **arguments: Any) -> dict[str, Any]:
        return await (await self._process(process)).ask(do=do, **arguments)

    def _start(self, key: tuple[str, bool]) -> Any:
        engine, requantised = key
        model = self._requantised() if requantised else self._kernels.model
        settings: dict[str, Any] = {"engine": engine, "model": str(model), "threads": self._setup.threads}
        if engine == "native":
            settings["instruction_set"] = self._kernels.instruction_set
        return start_runner(f"the engine {engine}", "kernels", settings)

    def _requantised(self) -> Path:
        """The model as Q4_0, made once and kept."""
        model = self._kernels.model
        target = cache_dir() / "bench" / f"{model.stem}.as-Q4_0.gguf"
        if not target.is_file() or target.stat().st_mtime < model.stat().st_mtime:
            from cllm_bench.kernels.requantise import requantise

            self._setup.view.say("making the Q4_0 file for llama.cpp")
            requantise(model, target)
        return target

    def _say(self, work: Work, side: str, repeat: int) -> None:
        self._setup.view.say(f"{work.label}: {self._setup.shown(side)}, {repeat + 1} of {self._setup.repeats}")


def _described(variant: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {'on' if value else 'off'}" for name, value in variant.items())


def _profile_line(work: str, phases: Mapping[str, float]) -> str:
    total = sum(phases.values()) or 1.0
    shares = [
        f"{phase} {number(seconds * 1e3)} ms ({seconds / total:.1%})"
        for phase, seconds in sorted(phases.items(), key=lambda item: -item[1])
    ]
    return f"profile: {work}, one pass, {total * 1e3:.1f} ms in all: {', '.join(shares)}"
