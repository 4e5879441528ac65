"""How fragmented the memory is. Too slow to call every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cllm.kv.paged.pool import BlockPool, free_runs
from cllm.kv.sequence import KVSequence

SAMPLE_BLOCKS = 1024
"""Block table entries sampled for the contiguity, about."""


class Fragmentation(NamedTuple):
    free_runs: int
    largest_free_run: int
    contiguity: float
    """The share of neighbours in running sequences' block tables that are neighbours in memory; 1 without any."""


def measure(pool: BlockPool, running: Iterable[KVSequence]) -> Fragmentation:
    _, lengths = free_runs(pool.free_map)
    return Fragmentation(len(lengths), int(lengths.max()) if len(lengths) else 0, contiguity(running))


def contiguity(running: Iterable[KVSequence]) -> float:
    pairs = adjacent = 0
    for sequence in running:
        table = np.array(sequence.blocks, np.int64)
        if len(table) > 1:
            pairs += len(table) - 1
            adjacent += int((np.diff(table) == 1).sum())
        if pairs >= SAMPLE_BLOCKS:
            break
    return adjacent / pairs if pairs else 1.0


def extents_needed(pool: BlockPool) -> int:
    """Extents needed if everything held were packed without holes."""
    return -(-(pool.total - pool.free) // pool.extents.size)


def blocks_to_move(pool: BlockPool, extents: int) -> int:
    """Blocks that a fill moves to empty the highest `extents` occupied extents."""
    live = pool.total - pool.free
    count = pool.extents.open
    used = np.array(pool.extents.widths[:count]) - np.array(pool.extents.room[:count])
    return min(int(used[used > 0][-extents:].sum()), pool.free_map.count(0, live, pool.total))
