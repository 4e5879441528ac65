"""Every side on the same text, beside the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from cllm._native import Engine
from cllm.backends.llama_cpp.library import load_library
from cllm.backends.native.loader import load_engine
from cllm.backends.native.sizes import packed_bytes
from cllm.bench.http import BenchError
from cllm.bench.kernels.blocks import BLOCK
from cllm.bench.kv_types.quality import Comparison, Floats, blocks_for, log_softmax, logits_in_turn
from cllm.bench.truth.llama import LlamaReference
from cllm.bench.truth.reference import Reference
from cllm.errors import CLLMError
from cllm.kv.memory import CPU_KV_TYPES
from cllm.machine import mib, read_rooms, tightest
from cllm.models.gguf import GGUFModel

TRUTH = "float32"
LLAMA = "llama.cpp"
PADDING = 256
_SCALED = 32
"""Numbers that share a scale in a quantised type."""

Say = Callable[[str], None]
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


@dataclass(slots=True)
class OfSide:
    engine: str
    way: str
    kv_type: str
    distance: Comparison = field(default_factory=Comparison)


@dataclass(slots=True)
class Measured:
    model: str
    sides: list[OfSide]
    versions: dict[str, str]
    left_out: dict[str, str] = field(default_factory=dict)
    """Sides that could not take part, and why."""
    interrupted: bool = False

    @property
    def perplexity(self) -> float | None:
        """Of the truth."""
        known = next((side.distance for side in self.sides if side.distance.positions), None)
        return None if known is None else float(np.exp(known.theirs / known.positions))


def measure(
    model: GGUFModel,
    texts: Sequence[Sequence[int]],
    *,
    threads: int,
    instruction_sets: Sequence[str],
    say: Say = lambda line: None,
) -> Measured:
    """An interrupt ends it early. Beside the truth, one engine is in memory at a time."""
    longest = max(map(len, texts))
    _check_room(model, longest)
    say("loading the weights as float32")
    truth = Reference(model, threads=threads)
    kv_types: Sequence[str] = CPU_KV_TYPES
    left_out: dict[str, str] = {}
    if model.shape.head_dim_k % _SCALED or model.shape.head_dim_v % _SCALED:
        kv_types = kv_types[:1]
        left_out["quantised K/V"] = f"the head size, {model.shape.head_dim_k}, is not a multiple of {_SCALED}"
    sides = _native(model, kv_types, instruction_sets, threads)
    try:
        load_library()
        sides += _llama(model, kv_types, longest, threads)
    except CLLMError as error:
        left_out[LLAMA] = str(error)
    of_sides = [OfSide(side.engine, side.way, side.kv_type) for side in sides]
    found = Measured(model.path.stem, of_sides, truth.versions, left_out)
    try:
        for number, tokens in enumerate(texts, 1):
            say(f"text {number} of {len(texts)}: {TRUTH}")
            expected = log_softmax(truth.logits(tokens))
            for side, of in zip(sides, of_sides, strict=True):
                if str(side) not in left_out:
                    say(f"text {number} of {len(texts)}: {side}")
                    _try(side, of, tokens, expected, left_out)
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def _check_room(model: GGUFModel, longest: int) -> None:
    """The weights as float32 and, of one engine, packed; logits of a text, the truth's and those of a side, each as
    they come and as probabilities."""
    weights = 4 * sum(prod(tensor.shape) for tensor in model.tensors.values())
    needed = weights + packed_bytes(model) + 4 * 4 * longest * model.shape.n_vocab
    room = tightest(read_rooms())
    if needed > room.free:
        raise BenchError(
            f"{model.path}: the truth takes {mib(needed)}, {mib(weights)} of it weights as float32, more than {room}; "
            "give a smaller model"
        )


def _try(side: Side, of: OfSide, tokens: Sequence[int], expected: Floats, left_out: dict[str, str]) -> None:
    """What llama.cpp cannot do is left out from then on."""
    try:
        _compare(side.rows, tokens, expected, of.distance)
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


class _OneEngine:
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
    engines = _OneEngine(model, threads)
    return [
        Side("native", name, kv_type, partial(_native_rows, engines, name, kv_type, model.shape.n_vocab))
        for name in instruction_sets
        for kv_type in kv_types
    ]


def _native_rows(
    engines: _OneEngine, name: str, kv_type: str, n_vocab: int, tokens: Sequence[int]
) -> Iterator[tuple[int, Floats]]:
    engine = engines.of(name)
    engine.allocate(blocks=blocks_for(len(tokens)), block_size=BLOCK, type_k=kv_type, type_v=kv_type)
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
