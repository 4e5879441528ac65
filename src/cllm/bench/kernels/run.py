"""All work, side by side and in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from cllm.bench.http import BenchError
from cllm.bench.kernels.processes import EngineProcess
from cllm.bench.kernels.table import GROUPED_INT8, INT8, MACHINE, MODEL_READ, READ, Measured
from cllm.bench.kernels.works import (
    FIRST_TOKEN,
    HELD,
    HELD_TOKENS,
    MANY,
    MEMORY,
    ONE_SHORT,
    OURS,
    PREFILL,
    SMOLLM2,
    Peer,
    Plan,
    Work,
)
from cllm.bench.machine import busy_percent
from cllm.errors import CLLMError
from cllm.models.gguf import GGUFModel
from cllm.models.registry import cache_dir

SETTLE_S = 0.2
"""Thread pools may spin for a moment after work."""
LIMIT_S = 0.25
"""How long each limit of the machine is measured in a repeat."""
QUICK_LIMIT_S = 0.05
QUICK_HELD_TOKENS = 512
LIMIT_NAMES = {
    "int8_macs_per_s": INT8,
    "grouped_int8_macs_per_s": GROUPED_INT8,
    "read_bytes_per_s": READ,
    "model_read_bytes_per_s": MODEL_READ,
}


@dataclass(frozen=True, slots=True)
class Options:
    model: Path
    threads: int
    repeats: int
    plan: Plan = SMOLLM2
    instruction_set: str = "auto"
    engines: frozenset[str] = frozenset({"llama", "genai"})
    """Those of the peers that take part."""
    sections: frozenset[str] = frozenset()
    """What is measured: some of the plan's."""
    quick: bool = False
    profile: bool = False
    progress: Callable[[str], None] = lambda line: None

    def sized(self, work: Work) -> Work:
        return work.quick() if self.quick else work


def weight_bytes_per_token(model: GGUFModel) -> float:
    """Bytes of weights, as the file stores them, that a decoded token reads: not those of a separate embedding."""
    tensors = model.tensors
    unread = tensors["token_embd.weight"].size if "output.weight" in tensors else 0
    return weight_bytes(model) - unread


def weight_bytes(model: GGUFModel) -> float:
    """As the file stores them."""
    return float(sum(tensor.size for tensor in model.tensors.values()))


def macs_per_token(model: GGUFModel) -> float:
    """Multiply-adds with weights that a prompt's token takes; without the head, which only the last one needs."""
    shape = model.shape
    n_ff = model.get(f"{shape.architecture}.feed_forward_length", 0)
    queries, keys = shape.n_heads * shape.head_dim_k, shape.n_kv_heads * shape.head_dim_k
    values, mixed = shape.n_kv_heads * shape.head_dim_v, shape.n_heads * shape.head_dim_v
    return float(shape.n_layers * shape.n_embd * (queries + keys + values + mixed + 3 * n_ff))


class KernelBench:
    """One run. Processes are started when they are first needed and stay until the end; idle ones sleep."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._processes: dict[tuple[str, bool], EngineProcess] = {}
        self._lost: set[tuple[str, bool]] = set()
        model = GGUFModel.open(options.model)
        self.measured = Measured(
            options.plan, macs_per_token(model), weight_bytes_per_token(model), file_bytes=weight_bytes(model)
        )

    def run(self) -> None:
        wanted = self.options.sections
        try:
            self.measured.facts[OURS] = self._process(OURS_PROCESS).facts
            for work in self.options.plan.works:
                if work.key in wanted:
                    self._try(work.label, partial(self._speeds, work))
            if HELD.key in wanted:
                self._try(HELD.label, self._slow_downs)
            if FIRST_TOKEN in wanted:
                self._try("load to first token", self._first_tokens)
            if MEMORY in wanted:
                self._try("resident memory", self._memory)
        finally:
            for process in self._processes.values():
                process.close()

    def _speeds(self, work: Work) -> None:
        """Tokens a second of everybody in turn; the order changes with the repeat, so that drift hits all alike."""
        peers = self._available(self.options.plan.peers_of(work))
        variants = {peer.label: self._tune(work, peer) for peer in peers}
        limits = [MACHINE] if work.key in (PREFILL.key, ONE_SHORT.key) else []
        for repeat, who in self._turns([OURS, *(peer.label for peer in peers), *limits]):
            self._progress(work, who, repeat)
            if who == MACHINE:
                self._limits(work, repeat)
            elif who == OURS:
                self.measured.add(work.key, who, repeat, self._speed(OURS_PROCESS, work, {}))
            else:
                peer = next(peer for peer in peers if peer.label == who)
                self.measured.add(work.key, who, repeat, self._speed(peer.process, work, variants[who]))
        if self.options.profile:
            ours = self._process(OURS_PROCESS)
            self.measured.profiles[work.label] = ours.ask("profile", work=self._sent(work))
        for key in {OURS_PROCESS, *(peer.process for peer in peers)}:
            self._process(key).ask("forget")

    def _tune(self, work: Work, peer: Peer) -> Mapping[str, Any]:
        """The peer's fastest settings for this work."""
        best = peer.variants[0]
        if len(peer.variants) > 1:
            speeds = []
            for variant in peer.variants:
                self.options.progress(f"{work.label}: {peer.label}, which settings are best")
                speeds.append(self._speed(peer.process, work, variant))
            best = peer.variants[speeds.index(max(speeds))]
        self.measured.variants[f"{peer.label}, {work.label}"] = best
        return best

    def _limits(self, work: Work, repeat: int) -> None:
        seconds = QUICK_LIMIT_S if self.options.quick else LIMIT_S
        limits = self._process(OURS_PROCESS).ask("limits", seconds=seconds)
        for name, what in LIMIT_NAMES.items():
            self.measured.add(f"{work.key}: {what}", MACHINE, repeat, limits[name])

    def _slow_downs(self) -> None:
        peers = self._available(self.options.plan.peers_of(HELD))
        by_label = {peer.label: peer for peer in peers}
        held = QUICK_HELD_TOKENS if self.options.quick else HELD_TOKENS
        for repeat, who in self._turns([OURS, *by_label]):
            self._progress(HELD, who, repeat)
            process = OURS_PROCESS if who == OURS else by_label[who].process
            variant = {} if who == OURS else by_label[who].variants[0]
            times = self._process(process).ask("slow_down", work=self._sent(HELD), variant=variant, held=held)
            self.measured.add(HELD.key, who, repeat, 100 * (times["beside_s"] / times["alone_s"] - 1))

    def _first_tokens(self) -> None:
        for repeat in range(self.options.repeats):
            self.options.progress(f"load to first token, {repeat + 1} of {self.options.repeats}")
            start = perf_counter()
            with EngineProcess("native", self._settings(OURS_PROCESS)) as process:
                seconds = process.ask("first_token")["seconds"]
                self.measured.add(f"{FIRST_TOKEN} of process", OURS, repeat, perf_counter() - start)
            self.measured.add(FIRST_TOKEN, OURS, repeat, seconds)

    def _memory(self) -> None:
        """In a process that has done nothing else."""
        with EngineProcess("native", self._settings(OURS_PROCESS)) as process:
            taken = process.ask("memory", work=self._sent(MANY))
        self.measured.facts[MEMORY] = taken
        beyond = taken["resident_bytes"] - taken["weight_bytes"] - taken["kv_bytes"]
        self.measured.add(MEMORY, OURS, 0, beyond / 1e6)

    def _speed(self, process: tuple[str, bool], work: Work, variant: Mapping[str, Any]) -> float:
        time.sleep(SETTLE_S)
        answer = self._process(process).ask("speed", work=self._sent(work), variant=variant)
        return float(answer["tokens_per_s"])

    def _sent(self, work: Work) -> dict[str, Any]:
        return asdict(self.options.sized(work))

    def _turns(self, everybody: Sequence[str]) -> list[tuple[int, str]]:
        self.measured.busy_percent = max(self.measured.busy_percent, busy_percent())
        return [
            (repeat, everybody[(index + repeat) % len(everybody)])
            for repeat in range(self.options.repeats)
            for index in range(len(everybody))
        ]

    def _available(self, peers: Sequence[Peer]) -> list[Peer]:
        """Those that take part and start. One that does not is left out, and the notes say why."""
        found = []
        for peer in peers:
            if peer.engine not in self.options.engines or peer.process in self._lost:
                continue
            try:
                self.measured.facts[peer.label] = self._process(peer.process).facts
                found.append(peer)
            except CLLMError as error:
                self._lost.add(peer.process)
                self.measured.left_out[peer.label] = str(error)
        return found

    def _process(self, key: tuple[str, bool]) -> EngineProcess:
        if key not in self._processes:
            self.options.progress(f"starting {key[0]}")
            self._processes[key] = EngineProcess(key[0], self._settings(key))
        return self._processes[key]

    def _settings(self, key: tuple[str, bool]) -> dict[str, Any]:
        engine, requantised = key
        model = self._requantised() if requantised else self.options.model
        settings: dict[str, Any] = {"model": str(model), "threads": self.options.threads}
        return settings | {"instruction_set": self.options.instruction_set} if engine == "native" else settings

    def _requantised(self) -> Path:
        """The model as Q4_0, made once and kept."""
        model = self.options.model
        target = cache_dir() / "bench" / f"{model.stem}.as-Q4_0.gguf"
        if not target.is_file() or target.stat().st_mtime < model.stat().st_mtime:
            from cllm.bench.kernels.requantise import requantise

            self.options.progress("making the Q4_0 file for llama.cpp")
            requantise(model, target)
        return target

    def _progress(self, work: Work, who: str, repeat: int) -> None:
        self.options.progress(f"{work.label}: {who}, {repeat + 1} of {self.options.repeats}")

    def _try(self, what: str, measure: Callable[[], None]) -> None:
        try:
            measure()
        except BenchError as error:
            self.measured.failures[what] = str(error)


OURS_PROCESS = ("native", False)
