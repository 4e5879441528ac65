"""What each pair of K and V types costs and saves: quality on a text, speed, bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from cllm._native import Engine
from cllm.backends.native.loader import load_engine
from cllm.kv.sizing import CPU_KV_TYPES
from cllm.machine import mib, read_memory_limits, tightest
from cllm.models.gguf import GGUFModel
from cllm_bench.figures import OURS, Figure, Limit, Run, own
from cllm_bench.kernels.blocks import BLOCK, BlockStreams
from cllm_bench.kernels.streams import fill, median_step_s
from cllm_bench.kernels.works import Work
from cllm_bench.machine import busy_percent
from cllm_bench.quality.comparison import FIGURES, Comparison, blocks_for, log_softmax, logits_in_turn
from cllm_bench.workloads.base import Keep, Setup, Workload

MANY = 32
QUICK_STREAMS = 4
MOST_OF_ROOM = 0.5
"""The share of the free memory for K/V of one work."""
LEAST_SPEED = 1.0
MOST_BYTES = 0.54


def _work(streams: int, context: int, steps: int) -> Work:
    label = f"{streams} stream{'s' if streams > 1 else ''} at {context:,}"
    return Work(f"{streams}x{context}", label, streams, context, steps)


WORKS = (_work(1, 2048, 32), _work(MANY, 512, 16), _work(MANY, 2048, 8))
QUICK_WORKS = (_work(1, 64, 4), _work(QUICK_STREAMS, 32, 4), _work(QUICK_STREAMS, 64, 4))


@dataclass(frozen=True, slots=True)
class Pair:
    type_k: str
    type_v: str

    def __str__(self) -> str:
        return f"{self.type_k}/{self.type_v}"


PAIRS = tuple(Pair(type_k, type_v) for type_k, type_v in product(CPU_KV_TYPES, repeat=2))
REFERENCE = Pair("f16", "f16")
JUDGED = Pair("q8_0", "q8_0")
"""The pair that must cost no speed."""


@dataclass(frozen=True)
class KvTypes(Workload):
    """All pairs in turn, on one engine: the texts, position by position, then decode steps."""

    model: GGUFModel
    texts: Sequence[Sequence[int]]
    instruction_set: str = "auto"
    small: bool = False

    name = "kv-types"
    figures = (
        Figure("bytes_per_token", "bytes/token", "", format=",.0f", compared=False),
        Figure("of_f16", "of f16", "", limit=own(MOST_BYTES), format=".3f", compared=False),
        *FIGURES,
    )

    @property
    def by_side(self) -> str:
        return str(REFERENCE)

    @property
    def title(self) -> str:
        return f"{self.model.path.stem}: pairs of K and V types"

    def quick(self) -> KvTypes:
        return replace(self, small=True)

    @property
    def works(self) -> tuple[Work, ...]:
        return QUICK_WORKS if self.small else WORKS

    @property
    def all_figures(self) -> list[Figure]:
        limit = Limit("ratio", LEAST_SPEED, {str(REFERENCE): LEAST_SPEED})
        return [
            *self.figures,
            *(
                Figure(work.key, work.label, "tok/s", "higher", limit if work.streams > 1 else None)
                for work in self.works
            ),
        ]

    async def measure(self, setup: Setup, keep: Keep) -> None:
        engine = load_engine(self.model, threads=setup.threads, instruction_set=self.instruction_set)
        works, notes = self._that_fit()
        facts = {"engine": engine.instruction_set, "threads": engine.threads, "notes": notes}
        total = len(PAIRS) * (len(self.texts) + setup.repeats)
        steps = iter(range(1, total + 1))

        def say(what: str, pair: Pair) -> None:
            setup.view.say(f"{next(steps)} of {total}: {what}, {pair}")

        found = {pair: Comparison() for pair in PAIRS}
        try:
            for number, tokens in enumerate(self.texts, 1):
                what = f"text {number} of {len(self.texts)}"
                compare_on(engine, self.model.spec.n_vocab, tokens, found, partial(say, what))
        finally:
            positions = found[REFERENCE].positions
            notes.insert(0, f"perplexity over {positions:,} positions; change, same top token and KL beside f16/f16")
            for pair, quality in found.items():
                size = {"bytes_per_token": self._bytes(pair), "of_f16": self._bytes(pair) / self._bytes(REFERENCE)}
                keep(Run(_side(pair), 0, size | quality.metrics, facts))
        for repeat in range(setup.repeats):
            # Each repeat begins with another pair: a slow spell of the machine hits all alike.
            for index in range(len(PAIRS)):
                pair = PAIRS[(index + repeat) % len(PAIRS)]
                say(f"speed, repeat {repeat + 1} of {setup.repeats}", pair)
                busy = busy_percent()
                measured = self._speeds(engine, pair, works)
                keep(Run(_side(pair), repeat, measured, {"busy_percent_before": busy}))

    def _bytes(self, pair: Pair) -> int:
        return self.model.spec.kv_bytes_per_token(pair.type_k, pair.type_v)

    def _that_fit(self) -> tuple[list[Work], list[str]]:
        """The works whose K/V as f16 fit in memory and in the model's context, and why the others do not."""
        room, context = tightest(read_memory_limits()), self.model.spec.context_length
        fitting, notes = [], []
        for work in self.works:
            needed = work.streams * work.room * self._bytes(REFERENCE)
            if work.room > context:
                notes.append(f"left out: {work.label}: the model's context is {context:,}")
            elif needed > MOST_OF_ROOM * room.free:
                notes.append(f"left out: {work.label}: K/V as f16 take {mib(needed)}, more than half of {room}")
            else:
                fitting.append(work)
        return fitting, notes

    def _speeds(self, engine: Engine, pair: Pair, works: Sequence[Work]) -> dict[str, float]:
        """Tokens a second. For works of the same context the streams are filled once."""
        n_vocab = self.model.spec.n_vocab
        speeds: dict[str, float] = {}
        for context in sorted({work.context for work in works}):
            alike = [work for work in works if work.context == context]
            most, room = max(alike, key=lambda work: work.streams), max(work.room for work in alike)
            streams = BlockStreams(engine, n_vocab, most.streams, room, type_k=pair.type_k, type_v=pair.type_v)
            fill(streams, most, n_vocab)
            speeds |= {work.key: work.streams / median_step_s(streams, work, n_vocab) for work in alike}
        return speeds


def _side(pair: Pair) -> str:
    return OURS if pair == JUDGED else str(pair)


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
        engine.allocate(cells=blocks_for(len(tokens)), block_size=BLOCK, type_k=pair.type_k, type_v=pair.type_v)
        for begin, logits in logits_in_turn(engine, n_vocab, tokens):
            following = tokens[begin + 1 : begin + 1 + len(logits)]
            rows, kept = log_softmax(logits), expected[begin : begin + len(logits)]
            if pair == REFERENCE:
                kept[:] = rows
            pairs[pair].add(rows[: len(following)], kept[: len(following)], following)
