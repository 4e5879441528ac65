"""What is it worth that a sequence's blocks are contiguous, with large pages and small ones?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cllm_bench.figures import OURS, Figure, Metrics, Run
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest
from cllm_bench.workloads.memory_moves import BLOCK, Plan, open_engine

if TYPE_CHECKING:
    from cllm._native import Engine

Blocks = NDArray[np.int32]

PAGES = ("large", "small")
SPARE = 4
"""The arena is this many times as large as what is used."""
PROMPT = 512
"""Tokens whose K/V stand in for all others'."""


@dataclass(frozen=True)
class MemoryPlacement(LocalWorkload):
    """Streams decode in an arena that is a quarter full: their blocks anywhere, moved together, and in runs.

    *Compacted* is what hole filling makes of *scattered*: the highest blocks have moved into the lowest holes, and what
    is free was given back.
    """

    streams: int = 8
    context: int = 8000
    steps: int = 24

    name = "memory-placement"
    figures = (
        Figure("tokens_per_s", "decode", "tok/s", "higher"),
        Figure("resident_mb", "arena in memory", "MB"),
        Figure("taken_percent", "the same, of what the blocks need", "%"),
    )

    @property
    def title(self) -> str:
        return (
            f"memory-placement: decode of {self.streams} streams at {self.context:,} tokens, by where their blocks "
            f"lie; ours: in runs, large pages"
        )

    def quick(self) -> MemoryPlacement:
        return replace(self, streams=2, context=600, steps=2)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        facts = {"busy_percent_before": await busy_at_rest()}
        metrics = await asyncio.to_thread(self._measure, setup)
        return [Run(side, repeat, metrics[side], facts) for side in sorted(metrics, key=lambda side: side != OURS)]

    def _measure(self, setup: Setup) -> dict[str, Metrics]:
        """An engine for either kind of pages; single steps of all arrangements follow each other, so that the machine's
        mood hits all alike."""
        per_stream = -(-(self.context + self.steps + 1) // BLOCK)
        used = self.streams * per_stream
        metrics: dict[str, Metrics] = {}
        places: dict[str, tuple[_Arena, Blocks]] = {}
        arenas = [_Arena(*open_engine(setup), SPARE * used, pages) for pages in PAGES]
        for arena in arenas:
            scattered = np.random.default_rng(0).permutation(SPARE * used)[:used].astype(np.int32)
            metrics[_side("scattered", arena)] = arena.fill(scattered)
            tables: dict[str, Blocks] = {
                "scattered": scattered,
                "compacted": arena.compact(scattered),
                "in runs": np.arange(used, dtype=np.int32),
            }
            for arrangement, table in tables.items():
                places[_side(arrangement, arena)] = arena, table.reshape(self.streams, per_stream)
        seconds = self._decode(places)
        for arena in arenas:  # a move leaves its source in place: until now all arrangements were there
            for arrangement in ("compacted", "in runs"):
                metrics[_side(arrangement, arena)] = arena.give_back_from(used)
        return {side: metrics[side] | {"tokens_per_s": self.streams / median(taken)} for side, taken in seconds.items()}

    def _decode(self, places: Mapping[str, tuple[_Arena, Blocks]]) -> dict[str, list[float]]:
        """Seconds of every step by side; the first of each is not counted."""
        seconds: dict[str, list[float]] = {side: [] for side in places}
        for step in range(-1, self.steps):
            for side in list(places)[:: 1 if step % 2 else -1]:
                arena, tables = places[side]
                taken = arena.decode(tables, self.context + step)
                if step >= 0:
                    seconds[side].append(taken)
        return seconds


def _side(arrangement: str, arena: _Arena) -> str:
    side = f"{arrangement}, {arena.pages} pages"
    return OURS if side == "in runs, large pages" else side


class _Arena:
    def __init__(self, engine: Engine, vocabulary: int, blocks: int, pages: str) -> None:
        engine.allocate(blocks=blocks, block_size=BLOCK, type_k="f16", type_v="f16", large_pages=pages == "large")
        self.pages = pages
        self._engine = engine
        self._vocabulary = vocabulary
        self._blocks = blocks
        self._block_bytes = engine.kv_bytes // blocks

    def fill(self, blocks: Blocks) -> Metrics:
        """Every block holds K/V of a prompt."""
        source = blocks[: PROMPT // BLOCK]
        count = len(source) * BLOCK
        self._step(self._tokens(count, 1), [(count, 0, 1, len(source))], source)
        rest = blocks[len(source) :]
        self._engine.copy_blocks(np.stack([np.resize(source, len(rest)), rest], axis=1))
        return self._resident(len(blocks))

    def compact(self, blocks: Blocks) -> Blocks:
        """Fill the holes among the lowest places; where each block is after that."""
        plan = fill_holes(blocks)
        self._engine.move_blocks(plan)
        now_at = np.arange(self._blocks, dtype=np.int32)
        now_at[plan[:, 0]] = plan[:, 1]
        return now_at[blocks]

    def give_back_from(self, used: int) -> Metrics:
        self._engine.release_pages(used, self._blocks - used)
        return self._resident(used)

    def decode(self, tables: Blocks, position: int) -> float:
        """Seconds of one step."""
        rows = len(tables)
        tokens = self._tokens(rows, position)
        begin = perf_counter()
        self._step(tokens, [(1, position, 1, tables.shape[1])] * rows, tables.ravel())
        return perf_counter() - begin

    def _resident(self, used: int) -> Metrics:
        resident = self._engine.resident_bytes()
        return {"resident_mb": resident / 1e6, "taken_percent": 100 * resident / (used * self._block_bytes)}

    def _tokens(self, count: int, seed: int) -> Blocks:
        return np.random.default_rng(seed).integers(self._vocabulary // 2, self._vocabulary, count, np.int32)

    def _step(self, tokens: Blocks, chunks: Sequence[tuple[int, int, int, int]], table: Blocks) -> None:
        logits = np.empty((len(chunks), self._vocabulary), np.float32)
        rows = np.zeros((len(chunks), 6), np.int32)  # nothing is dropped, so nothing is kept apart
        rows[:, :4] = chunks
        self._engine.step(tokens, rows, np.ascontiguousarray(table), logits)


def fill_holes(live: Blocks) -> Plan:
    """Moves of single blocks, after which these blocks are the first of the arena."""
    holes = np.setdiff1d(np.arange(len(live), dtype=np.int32), live)
    high = np.sort(live[live >= len(live)])[::-1]
    return np.stack([high, holes, np.ones_like(holes)], axis=1).astype(np.int32)
