"""How fast are KV blocks moved, compared with memcpy?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cllm.models.gguf import GGUFModel
from cllm_bench.figures import OURS, Figure, Metrics, Run, times_the_peer
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest

if TYPE_CHECKING:  # where the extension does not load, other workloads still run
    from cllm._native import Engine

MEMCPY = "memcpy"
BLOCK = 16
LEAST_OF_MEMCPY = 0.6

Plan = NDArray[np.int32]
"""Rows of source, target, number of blocks."""


@dataclass(frozen=True)
class MemoryMoves(LocalWorkload):
    """Plans as a compaction makes them, and memcpy between buffers outside the caches, on the same threads in turn."""

    blocks: int = 4096
    """The arena's size, all of it in memory."""
    moved: int = 1024
    rounds: int = 10
    memcpy_s: float = 0.15

    name = "memory-compaction"
    figures = (
        Figure("fill_gb_per_s", "blocks into holes", "GB/s", "higher", times_the_peer(LEAST_OF_MEMCPY)),
        Figure("slide_gb_per_s", "a run slides down by 8", "GB/s", "higher", times_the_peer(LEAST_OF_MEMCPY)),
        Figure("slide_one_gb_per_s", "a run slides down by 1", "GB/s", "higher", times_the_peer(LEAST_OF_MEMCPY)),
        Figure("slice_gb_per_s", "8 blocks, as between two steps", "GB/s", "higher"),
    )

    @property
    def title(self) -> str:
        return f"memory-compaction: {self.moved} blocks moved within {self.blocks}, {self.rounds} rounds beside memcpy"

    def quick(self) -> MemoryMoves:
        return replace(self, blocks=128, moved=32, rounds=2, memcpy_s=0.02)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        facts = {"busy_percent_before": await busy_at_rest()}
        engine, _ = await asyncio.to_thread(open_engine, setup)
        ours, memcpy = await asyncio.to_thread(self._measure, engine)
        return [Run(OURS, repeat, ours, facts), Run(MEMCPY, repeat, memcpy)]

    def _measure(self, engine: Engine) -> tuple[Metrics, Metrics]:
        from cllm_bench._limits import measure_copy

        engine.allocate(blocks=self.blocks, block_size=BLOCK, type_k="f16", type_v="f16")
        engine.prepare_pages(0, self.blocks)
        block_bytes = engine.kv_bytes // self.blocks
        plans = self._plans()
        best = dict.fromkeys(plans, 0.0)
        memcpy = 0.0
        for _ in range(self.rounds):
            memcpy = max(memcpy, measure_copy(engine.threads, self.memcpy_s, self.moved * block_bytes))
            for key, plan in plans.items():
                begin = perf_counter()
                engine.move_blocks(plan)
                seconds = perf_counter() - begin
                best[key] = max(best[key], int(plan[:, 2].sum()) * block_bytes / seconds)
        return {key: rate / 1e9 for key, rate in best.items()}, dict.fromkeys(plans, memcpy / 1e9)

    def _plans(self) -> Mapping[str, Plan]:
        """The highest blocks into every second place from the beginning; runs that overlap their targets."""
        places = np.arange(self.moved, dtype=np.int32)
        fill = np.stack([self.blocks - 1 - places, 2 * places, np.ones_like(places)], axis=1)
        fill = fill[fill[:, 0] > fill[:, 1]]
        return {
            "fill_gb_per_s": fill,
            "slide_gb_per_s": np.array([(8, 0, self.moved)], np.int32),
            "slide_one_gb_per_s": np.array([(1, 0, self.moved)], np.int32),
            "slice_gb_per_s": fill[:8],
        }


def open_engine(setup: Setup) -> tuple[Engine, int]:
    """The model in an engine, and the size of its vocabulary."""
    from cllm.backends.native.loader import load_engine

    model = GGUFModel.open(setup.model_file)
    return load_engine(model, threads=setup.threads), model.shape.n_vocab
