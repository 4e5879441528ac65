"""All pairs of K and V types in turn, on one engine: a text, position by position, then decode steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import median

import numpy as np

from cllm._native import Engine
from cllm.bench.kernels.blocks import BLOCK, BlockStreams
from cllm.bench.kernels.streams import fill, median_step_s
from cllm.bench.kernels.works import Work
from cllm.bench.kv_types.quality import Comparison, blocks_for, log_softmax, logits_in_turn
from cllm.bench.machine import busy_percent
from cllm.kv.memory import CPU_KV_TYPES, bytes_per_token
from cllm.machine import mib, read_rooms, tightest
from cllm.models.shape import ModelShape

MANY = 32
QUICK_STREAMS = 4


def _work(streams: int, context: int, steps: int) -> Work:
    label = f"{streams} stream{'s' if streams > 1 else ''} at {context:,}"
    return Work(f"{streams}x{context}", label, streams, context, steps)


WORKS = (_work(1, 2048, 32), _work(MANY, 512, 16), _work(MANY, 2048, 8))
QUICK_WORKS = (_work(1, 64, 4), _work(QUICK_STREAMS, 32, 4), _work(QUICK_STREAMS, 64, 4))
MOST_OF_ROOM = 0.5
"""Of the free memory, for K/V of one work."""


@dataclass(frozen=True, slots=True)
class Pair:
    type_k: str
    type_v: str

    def __str__(self) -> str:
        return f"{self.type_k}/{self.type_v}"


PAIRS = tuple(Pair(type_k, type_v) for type_k, type_v in product(CPU_KV_TYPES, repeat=2))
REFERENCE = Pair("f16", "f16")


@dataclass(slots=True)
class OfPair:
    bytes_per_token: int
    quality: Comparison = field(default_factory=Comparison)
    speeds: dict[str, dict[int, float]] = field(default_factory=dict)
    """Tokens a second by work and repeat."""

    def speed(self, work: str) -> float | None:
        values = self.speeds.get(work)
        return median(values.values()) if values else None


@dataclass(slots=True)
class Measured:
    model: str
    instruction_set: str
    threads: int
    works: Sequence[Work]
    pairs: dict[Pair, OfPair]
    notes: list[str] = field(default_factory=list)
    busy_percent: float = 0.0
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    engine: Engine
    shape: ModelShape
    texts: Sequence[Sequence[int]]


def measure(
    subject: Subject, works: Sequence[Work], *, repeats: int, progress: Callable[[str], None] = lambda line: None
) -> Measured:
    """An interrupt ends it early."""
    found = Measured(
        subject.name,
        subject.engine.instruction_set,
        subject.engine.threads,
        works,
        {pair: OfPair(_bytes(subject.shape, pair)) for pair in PAIRS},
    )
    found.works = _that_fit(found, works, subject.shape.context_length)
    total = len(PAIRS) * (len(subject.texts) + repeats)
    steps = iter(range(1, total + 1))

    def say(what: str, pair: Pair) -> None:
        progress(f"{next(steps)} of {total}: {what}, {pair}")

    try:
        qualities = {pair: of.quality for pair, of in found.pairs.items()}
        for number, tokens in enumerate(subject.texts, 1):
            what = f"text {number} of {len(subject.texts)}"
            compare_on(subject.engine, subject.shape.n_vocab, tokens, qualities, partial(say, what))
        for repeat in range(repeats):
            _time(subject, repeat, found, partial(say, f"speed, repeat {repeat + 1} of {repeats}"))
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def _bytes(shape: ModelShape, pair: Pair) -> int:
    return bytes_per_token(
        n_layers=shape.n_layers,
        n_kv_heads=shape.n_kv_heads,
        head_dim_k=shape.head_dim_k,
        head_dim_v=shape.head_dim_v,
        type_k=pair.type_k,
        type_v=pair.type_v,
    )


def _that_fit(found: Measured, works: Sequence[Work], context: int) -> list[Work]:
    """Those whose K/V as f16 fit in memory and in the model's context."""
    room = tightest(read_rooms())
    fitting = []
    for work in works:
        needed = work.streams * work.room * found.pairs[REFERENCE].bytes_per_token
        if work.room > context:
            found.notes.append(f"left out: {work.label}: the model's context is {context:,}")
        elif needed > MOST_OF_ROOM * room.free:
            found.notes.append(f"left out: {work.label}: K/V as f16 take {mib(needed)}, more than half of {room}")
        else:
            fitting.append(work)
    return fitting


def compare_on(
    engine: Engine,
    n_vocab: int,
    tokens: Sequence[int],
    pairs: Mapping[Pair, Comparison],
    say: Callable[[Pair], None] = lambda pair: None,
) -> None:
    """One text with every pair, f16/f16 first: its log probabilities are what the others are compared with."""
    expected = np.empty((len(tokens), n_vocab), np.float32)
    for pair in (REFERENCE, *(pair for pair in pairs if pair != REFERENCE)):
        say(pair)
        engine.allocate(blocks=blocks_for(len(tokens)), block_size=BLOCK, type_k=pair.type_k, type_v=pair.type_v)
        for begin, logits in logits_in_turn(engine, n_vocab, tokens):
            following = tokens[begin + 1 : begin + 1 + len(logits)]
            rows, kept = log_softmax(logits), expected[begin : begin + len(logits)]
            if pair == REFERENCE:
                kept[:] = rows
            pairs[pair].add(rows[: len(following)], kept[: len(following)], following)


def _time(subject: Subject, repeat: int, found: Measured, say: Callable[[Pair], None]) -> None:
    """Every pair once, each repeat beginning with another one: a slow spell of the machine hits all alike."""
    for index in range(len(PAIRS)):
        pair = PAIRS[(index + repeat) % len(PAIRS)]
        say(pair)
        found.busy_percent = max(found.busy_percent, busy_percent())
        for context in sorted({work.context for work in found.works}):
            _time_works(subject, pair, [work for work in found.works if work.context == context], repeat, found)


def _time_works(subject: Subject, pair: Pair, works: Sequence[Work], repeat: int, found: Measured) -> None:
    """Works of the same context: the streams are filled once for all of them."""
    n_vocab = subject.shape.n_vocab
    most, room = max(works, key=lambda work: work.streams), max(work.room for work in works)
    streams = BlockStreams(subject.engine, n_vocab, most.streams, room, type_k=pair.type_k, type_v=pair.type_v)
    fill(streams, most, n_vocab)
    for work in works:
        speed = work.streams / median_step_s(streams, work, n_vocab)
        found.pairs[pair].speeds.setdefault(work.key, {})[repeat] = speed
