"""What does it give that blocks lie together, on large pages and on small ones?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from cllm.bench.figures import OURS, Figure, Metrics, Run
from cllm.bench.workloads.base import LocalWorkload, Setup, busy_at_rest
from cllm.bench.workloads.memory_moves import BLOCK, Plan, open_engine

if TYPE_CHECKING:
    from cllm._native import Engine

Arrangement = Literal["in runs", "compacted", "scattered"]
Blocks = NDArray[np.int32]

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

    name = "memory-compaction"
    figures = (
        Figure("tokens_per_s", "decode", "tok/s", "higher"),
        Figure("resident_mb", "arena in memory", "MB"),
        Figure("taken_percent", "the same, of what the blocks need", "%"),
        Figure("compact_s", "moving and giving back took", "s"),
    )

    @property
    def title(self) -> str:
        return (
            f"memory-compaction: decode of {self.streams} streams at {self.context:,} tokens, by where their blocks "
            f"lie; ours: in runs, large pages"
        )

    @property
    def label(self) -> str:
        return "memory-compaction, placement"

    def quick(self) -> MemoryPlacement:
        return replace(self, streams=2, context=600, steps=2)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        facts = {"busy_percent_before": await busy_at_rest()}
        engine, vocabulary = await asyncio.to_thread(open_engine, setup)
        runs = []
        for large in (True, False) if repeat % 2 == 0 else (False, True):
            for arrangement, metrics in await asyncio.to_thread(self._measure, engine, vocabulary, large):
                side = f"{arrangement}, {'large' if large else 'small'} pages"
                runs.append(Run(OURS if side == "in runs, large pages" else side, repeat, metrics, facts))
        return runs

    def _measure(self, engine: Engine, vocabulary: int, large_pages: bool) -> list[tuple[Arrangement, Metrics]]:
        per_stream = -(-(self.context + self.steps + 1) // BLOCK)
        used = self.streams * per_stream
        arena = _Arena(engine, vocabulary, SPARE * used, large_pages)
        in_runs = np.arange(used, dtype=np.int32).reshape(self.streams, per_stream)
        arena.fill(in_runs)
        found: list[tuple[Arrangement, Metrics]] = [("in runs", self._figures(arena, in_runs))]
        scattered = np.random.default_rng(0).permutation(SPARE * used)[:used].astype(np.int32).reshape(in_runs.shape)
        arena.empty()
        arena.fill(scattered)
        found.append(("scattered", self._figures(arena, scattered)))
        begin = perf_counter()
        compacted = arena.compact(scattered)
        seconds = perf_counter() - begin
        found.append(("compacted", self._figures(arena, compacted) | {"compact_s": seconds}))
        return found

    def _figures(self, arena: _Arena, tables: Blocks) -> Metrics:
        seconds = [arena.decode(tables, self.context + step) for step in range(-1, self.steps)][1:]
        resident = arena.engine.resident_bytes()
        return {
            "tokens_per_s": self.streams / median(seconds),
            "resident_mb": resident / 1e6,
            "taken_percent": 100 * resident / (tables.size * arena.block_bytes),
        }


class _Arena:
    def __init__(self, engine: Engine, vocabulary: int, blocks: int, large_pages: bool) -> None:
        engine.allocate(blocks=blocks, block_size=BLOCK, type_k="f16", type_v="f16", large_pages=large_pages)
        self.engine = engine
        self.blocks = blocks
        self.block_bytes = engine.kv_bytes // blocks
        self._vocabulary = vocabulary

    def fill(self, tables: Blocks) -> None:
        """Every block holds K/V of a prompt."""
        source = tables.ravel()[: PROMPT // BLOCK]
        count = len(source) * BLOCK
        tokens = np.random.default_rng(1).integers(self._vocabulary // 2, self._vocabulary, count, np.int32)
        self._step(tokens, [(count, 0, 1, len(source))], source)
        rest = tables.ravel()[len(source) :]
        self.engine.copy_blocks(np.stack([np.resize(source, len(rest)), rest], axis=1))

    def empty(self) -> None:
        self.engine.release_pages(0, self.blocks)

    def decode(self, tables: Blocks, position: int) -> float:
        """Seconds of one step."""
        rows = len(tables)
        tokens = np.random.default_rng(position).integers(self._vocabulary // 2, self._vocabulary, rows, np.int32)
        begin = perf_counter()
        self._step(tokens, [(1, position, 1, tables.shape[1])] * rows, tables.ravel())
        return perf_counter() - begin

    def compact(self, tables: Blocks) -> Blocks:
        """Fill the holes among the lowest places; the tables after that."""
        plan = fill_holes(tables.ravel())
        self.engine.move_blocks(plan)
        self.engine.release_pages(tables.size, self.blocks - tables.size)
        now_at = np.arange(self.blocks, dtype=np.int32)
        now_at[plan[:, 0]] = plan[:, 1]
        return now_at[tables]

    def _step(self, tokens: Blocks, chunks: Sequence[tuple[int, int, int, int]], table: Blocks) -> None:
        logits = np.empty((len(chunks), self._vocabulary), np.float32)
        self.engine.step(tokens, np.array(chunks, np.int32), np.ascontiguousarray(table), logits)


def fill_holes(live: Blocks) -> Plan:
    """Moves of single blocks, after which these blocks are the first of the arena."""
    holes = np.setdiff1d(np.arange(len(live), dtype=np.int32), live)
    high = np.sort(live[live >= len(live)])[::-1]
    return np.stack([high, holes, np.ones_like(holes)], axis=1).astype(np.int32)
