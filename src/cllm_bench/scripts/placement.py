"""What placing blocks in runs is worth: `kv.placement` runs against any, on the same load.

    python src/cllm_bench/scripts/placement.py --json placement.json

People come with prompts of mixed lengths, a third of which begin alike; 64 run at once, each step generates a token for
everyone, and what is cached is evicted at the usual threshold. No model computes anything. Printed are means over the
run: the share of neighbouring blocks of a sequence that are neighbours in memory, extents in use for each that would
do, and what a compaction would have to move and could give back; and the same for the end, when all have left and what
is cached has been evicted down to a quarter of the memory.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from statistics import fmean

from cllm.kv.ops import BlockGeometry
from cllm.kv.paged.fragmentation import blocks_to_move, contiguity, extents_needed
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.sequence import KVSequence
from cllm_bench.simulate.backend import SimulatedBlocks

BLOCK_SIZE, BYTES_PER_TOKEN = 16, 23_040
GEOMETRY = BlockGeometry(5_600, BLOCK_SIZE)
"""2 GB for smollm2."""


class Load:
    def __init__(self, placement: str, running: int, seed: int) -> None:
        self.kv = PagedKVManager(
            SimulatedBlocks(),
            GEOMETRY,
            bytes_per_token=BYTES_PER_TOKEN,
            eviction_threshold=0.8,
            watermark=0.02,
            placement=placement,
        )
        self._random = random.Random(seed)
        self._shared = self._tokens(700)
        self._most = running
        self._running: list[tuple[KVSequence, int]] = []

    def step(self) -> None:
        while len(self._running) < self._most and self._admit():
            pass
        for sequence, end in list(self._running):
            sequence.tokens.append(self._random.randrange(49_000))
            if not self.kv.grow(sequence, 1) or len(sequence.tokens) >= end:
                self._running.remove((sequence, end))
                self.kv.release(sequence)
                continue
            sequence.num_computed += 1
            self.kv.commit(sequence)
        self.kv.maintain(0.0)

    def _admit(self) -> bool:
        draw = self._random
        own = self._tokens(min(3000, int(draw.lognormvariate(5.5, 1.0)) + 8))
        sequence = KVSequence(self._shared + own if draw.random() < 1 / 3 else own)
        if self.kv.admit(sequence) is None:
            return False
        sequence.num_computed = len(sequence.tokens)
        self.kv.commit(sequence)
        self._running.append((sequence, len(sequence.tokens) + min(2000, int(draw.lognormvariate(5.0, 1.0)) + 2)))
        return True

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(49_000), k=count)

    def end(self) -> None:
        for sequence, _ in self._running:
            self.kv.release(sequence)
        self._running = []
        self.kv._evict(self.kv.usage().evictable - GEOMETRY.blocks // 4)

    def measured(self) -> dict[str, float]:
        pool = self.kv._pool
        needed = extents_needed(pool)
        spare = pool.extents.occupied - needed
        moved = blocks_to_move(pool, spare) if spare else 0
        scale = BLOCK_SIZE * BYTES_PER_TOKEN / 2**20
        return {
            "contiguity": contiguity(sequence for sequence, _ in self._running),
            "extents_used_for_each_needed": pool.extents.occupied / needed,
            "to_move_mib": moved * scale,
            "to_give_back_mib": spare * pool.extents.size * scale,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for placement in ("runs", "any"):
        load = Load(placement, options.running, options.seed)
        samples = []
        for step in range(options.steps):
            load.step()
            if step >= 200 and step % 20 == 0:
                samples.append(load.measured())
        load.end()
        results[placement] = {
            **{name: fmean(sample[name] for sample in samples) for name in samples[0]},
            **{f"end_{name}": value for name, value in load.measured().items() if name != "contiguity"},
        }
        print(f"{placement:>5}: " + ", ".join(f"{name} {value:.4g}" for name, value in results[placement].items()))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
