"""Every side on the same text, beside the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from cllm._native import Engine
from cllm.backends.native.loader import load_engine
from cllm.bench.kernels.blocks import BLOCK
from cllm.bench.kv_types.quality import Comparison, Floats, blocks_for, log_softmax, logits_in_turn
from cllm.bench.truth.llama import LlamaReference
from cllm.bench.truth.reference import Reference
from cllm.errors import CLLMError
from cllm.kv.memory import CPU_KV_TYPES
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
    """An interrupt ends it early."""
    say("loading the weights as float32")
    truth = Reference(model, threads=threads)
    kv_types: Sequence[str] = CPU_KV_TYPES
    left_out: dict[str, str] = {}
    if model.shape.head_dim_k % _SCALED or model.shape.head_dim_v % _SCALED:
        kv_types = kv_types[:1]
        left_out["quantised K/V"] = f"heads of {model.shape.head_dim_k} are no multiple of {_SCALED}"
    longest = max(map(len, texts))
    with ExitStack() as open_sides:
        sides = _native(model, kv_types, instruction_sets, threads)
        try:
            sides += _llama(model, kv_types, longest, threads, open_sides)
        except CLLMError as error:
            left_out[LLAMA] = str(error)
        found = Measured(
            model.path.stem, [OfSide(side.engine, side.way, side.kv_type) for side in sides], truth.versions, left_out
        )
        try:
            for number, tokens in enumerate(texts, 1):
                say(f"text {number} of {len(texts)}: {TRUTH}")
                expected = log_softmax(truth.logits(tokens))
                for side, of in zip(sides, found.sides, strict=True):
                    say(f"text {number} of {len(texts)}: {side}")
                    _compare(side.rows, tokens, expected, of.distance)
        except KeyboardInterrupt:
            found.interrupted = True
    return found


def _compare(rows: Rows, tokens: Sequence[int], expected: Floats, distance: Comparison) -> None:
    for begin, logits in rows(tokens):
        following = tokens[begin + 1 : begin + 1 + len(logits)]
        count = len(following)
        if count:
            distance.add(log_softmax(logits[:count]), expected[begin : begin + count], following)


def _native(model: GGUFModel, kv_types: Sequence[str], instruction_sets: Sequence[str], threads: int) -> list[Side]:
    sides = []
    for name in instruction_sets:
        engine = load_engine(model, threads=threads, instruction_set=name)
        for kv_type in kv_types:
            rows = _native_rows(engine, model.shape.n_vocab, kv_type)
            sides.append(Side("native", engine.instruction_set, kv_type, rows))
    return sides


def _native_rows(engine: Engine, n_vocab: int, kv_type: str) -> Rows:
    def rows(tokens: Sequence[int]) -> Iterator[tuple[int, Floats]]:
        engine.allocate(blocks=blocks_for(len(tokens)), block_size=BLOCK, type_k=kv_type, type_v=kv_type)
        return logits_in_turn(engine, n_vocab, tokens)

    return rows


def _llama(model: GGUFModel, kv_types: Sequence[str], longest: int, threads: int, stack: ExitStack) -> list[Side]:
    sides = []
    context = -(-longest // PADDING) * PADDING
    for flash, kv_type in ((False, "f16"), *((True, kv_type) for kv_type in kv_types)):
        llama = stack.enter_context(
            LlamaReference(model.path, context=context, threads=threads, kv_type=kv_type, flash=flash)
        )
        sides.append(Side(LLAMA, f"flash attention {'on' if flash else 'off'}", kv_type, _llama_rows(llama)))
    return sides


def _llama_rows(llama: LlamaReference) -> Rows:
    def rows(tokens: Sequence[int]) -> Iterator[tuple[int, Floats]]:
        yield 0, llama.logits(tokens)

    return rows
