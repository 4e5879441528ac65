"""How far an engine is from the same weights computed in float32 throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from cllm._native import Engine
from cllm.backends.llama_cpp.library import load_library
from cllm.backends.native.loader import load_engine
from cllm.backends.native.sizes import packed_bytes
from cllm.errors import CLLMError
from cllm.kv.sizing import CPU_KV_TYPES
from cllm.machine import mib, read_memory_limits, tightest
from cllm.models.gguf import GGUFModel
from cllm_bench.errors import BenchError
from cllm_bench.figures import Run
from cllm_bench.kernels.blocks import BLOCK
from cllm_bench.quality.comparison import FIGURES, Comparison, Floats, blocks_for, log_softmax, logits_in_turn
from cllm_bench.quality.llama import LlamaReference
from cllm_bench.quality.reference import Reference
from cllm_bench.workloads.base import Keep, Setup, Workload

TRUTH = "float32"
LLAMA = "llama.cpp"
PADDING = 256
_SCALED = 32
"""Numbers that share a scale in a quantised type."""

Rows = Callable[[Sequence[int]], Iterator[tuple[int, Floats]]]
"""Logits of a text's positions, some at a time, with the first one's position."""


@dataclass(frozen=True, slots=True)
class Side:
    """One way to compute."""

    engine: str
    way: str
    """The instruction set, or whether attention is flash attention."""
    kv_type: str
    rows: Rows

    def __str__(self) -> str:
        return f"{self.engine}, {self.way}, K/V {self.kv_type}"


@dataclass(frozen=True)
class Truth(Workload):
    """Every side on the same text. Beside the truth, one engine is in memory at a time."""

    model: GGUFModel
    texts: Sequence[Sequence[int]]
    instruction_sets: Sequence[str]

    name = "truth"
    figures = FIGURES

    @property
    def by_side(self) -> str:
        return TRUTH

    @property
    def title(self) -> str:
        return f"{self.model.path.stem}: distance to the truth"

    def quick(self) -> Truth:
        return replace(self, texts=self.texts[:1])

    async def measure(self, setup: Setup, keep: Keep) -> None:
        model = self.model
        longest = max(map(len, self.texts))
        _check_room(model, longest)
        setup.view.say("loading the weights as float32")
        truth = Reference(model, threads=setup.threads)
        kv_types: Sequence[str] = CPU_KV_TYPES
        left_out: dict[str, str] = {}
        attention = model.spec.layers[0].attends
        if attention.head_dim_k % _SCALED or attention.head_dim_v % _SCALED:
            kv_types = kv_types[:1]
            left_out["quantised K/V"] = f"the head size, {attention.head_dim_k}, is not a multiple of {_SCALED}"
        sides = _native(model, kv_types, self.instruction_sets, setup.threads)
        try:
            load_library()
            sides += _llama(model, kv_types, longest, setup.threads)
        except CLLMError as error:
            left_out[LLAMA] = str(error)
        distances = {side: Comparison() for side in sides}
        try:
            for number, tokens in enumerate(self.texts, 1):
                text = f"text {number} of {len(self.texts)}"
                setup.view.say(f"{text}: {TRUTH}")
                expected = log_softmax(truth.logits(tokens))
                for side, distance in distances.items():
                    if str(side) not in left_out:
                        setup.view.say(f"{text}: {side}")
                        _try(side, distance, tokens, expected, left_out)
        finally:
            for run in _runs(truth, distances, left_out):
                keep(run)


def _runs(truth: Reference, distances: Mapping[Side, Comparison], left_out: Mapping[str, str]) -> Iterator[Run]:
    """A run of the truth, of every side, and of what was left out."""
    positions = max(distance.positions for distance in distances.values())
    versions = ", ".join(f"{name} {version}" for name, version in truth.versions.items())
    notes = [
        f"over {positions:,} positions; the truth is the same weights computed in float32 ({versions}); change, same "
        "top token and KL (Kullback-Leibler divergence, nats) beside it",
        *(
            f"{side}: over {distance.positions:,} positions only"
            for side, distance in distances.items()
            if 0 < distance.positions < positions
        ),
    ]
    known = next((distance for distance in distances.values() if distance.positions), None)
    perplexity = {} if known is None else {"perplexity": float(np.exp(known.theirs / known.positions)), "mean_kl": 0.0}
    yield Run(TRUTH, 0, perplexity, {"versions": truth.versions, "notes": notes})
    for side, distance in distances.items():
        facts = {"engine": side.engine, "way": side.way, "kv_type": side.kv_type}
        if str(side) in left_out:
            facts["left_out"] = left_out[str(side)]
        yield Run(str(side), 0, distance.metrics, facts)
    for side_name in left_out.keys() - set(map(str, distances)):
        yield Run(side_name, 0, {}, {"left_out": left_out[side_name]})


def _check_room(model: GGUFModel, longest: int) -> None:
    """The weights as float32 and, of one engine, packed; logits of a text, the truth's and those of a side, each as
    they come and as probabilities."""
    weights = 4 * sum(prod(tensor.shape) for tensor in model.tensors.values())
    needed = weights + packed_bytes(model) + 4 * 4 * longest * model.spec.n_vocab
    room = tightest(read_memory_limits())
    if needed > room.free:
        raise BenchError(
            f"{model.path}: the truth takes {mib(needed)}, {mib(weights)} of it weights as float32, more than {room}; "
            "give a smaller model"
        )


def _try(side: Side, distance: Comparison, tokens: Sequence[int], expected: Floats, left_out: dict[str, str]) -> None:
    """What llama.cpp cannot do is left out from then on."""
    try:
        _compare(side.rows, tokens, expected, distance)
    except CLLMError as error:
        if side.engine != LLAMA:
            raise
        left_out[str(side)] = str(error)


def _compare(rows: Rows, tokens: Sequence[int], expected: Floats, distance: Comparison) -> None:
    for begin, logits in rows(tokens):
        following = tokens[begin + 1 : begin + 1 + len(logits)]
        count = len(following)
        if count:
            distance.add(log_softmax(logits[:count]), expected[begin : begin + count], following)


class _LoadedEngine:
    """The native engine, of one instruction set at a time."""

    def __init__(self, model: GGUFModel, threads: int) -> None:
        self._model, self._threads = model, threads
        self._engine: Engine | None = None

    def of(self, instruction_set: str) -> Engine:
        if self._engine is None or self._engine.instruction_set != instruction_set:
            self._engine = None  # before the next one takes its memory
            self._engine = load_engine(self._model, threads=self._threads, instruction_set=instruction_set)
        return self._engine


def _native(model: GGUFModel, kv_types: Sequence[str], instruction_sets: Sequence[str], threads: int) -> list[Side]:
    engines = _LoadedEngine(model, threads)
    return [
        Side("native", name, kv_type, partial(_native_rows, engines, name, kv_type, model.spec.n_vocab))
        for name in instruction_sets
        for kv_type in kv_types
    ]


def _native_rows(
    engines: _LoadedEngine, name: str, kv_type: str, n_vocab: int, tokens: Sequence[int]
) -> Iterator[tuple[int, Floats]]:
    engine = engines.of(name)
    engine.allocate(cells=blocks_for(len(tokens)), block_size=BLOCK, type_k=kv_type, type_v=kv_type)
    return logits_in_turn(engine, n_vocab, tokens)


def _llama(model: GGUFModel, kv_types: Sequence[str], longest: int, threads: int) -> list[Side]:
    context = -(-longest // PADDING) * PADDING
    sides = []
    for flash, kv_type in ((False, "f16"), *((True, kv_type) for kv_type in kv_types)):
        rows = partial(_llama_rows, model.path, context, threads, kv_type, flash)
        sides.append(Side(LLAMA, f"flash attention {'on' if flash else 'off'}", kv_type, rows))
    return sides


def _llama_rows(
    path: Path, context: int, threads: int, kv_type: str, flash: bool, tokens: Sequence[int]
) -> Iterator[tuple[int, Floats]]:
    with LlamaReference(path, context=context, threads=threads, kv_type=kv_type, flash=flash) as llama:
        yield 0, llama.logits(tokens)
