"""How scattered the memory is, in numbers. Nothing here is for every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cllm.kv.pool import BlockPool, free_runs
from cllm.kv.sequence import KVSequence

SAMPLE_BLOCKS = 1024
"""Entries of block tables that are looked at for the contiguity, about."""


class Fragmentation(NamedTuple):
    free_runs: int
    largest_free_run: int
    contiguity: float
    """Of neighbours in a running sequence's block table, the share that are neighbours in memory; 1 without any."""


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
    """Extents that what is held would fill if it lay without holes."""
    return -(-(pool.total - pool.free) // pool.extents.size)


def blocks_to_move(pool: BlockPool, extents: int) -> int:
    """Blocks that a fill moves until the highest so many extents that hold something are empty."""
    live = pool.total - pool.free
    count = pool.extents.open
    used = np.array(pool.extents.widths[:count]) - np.array(pool.extents.room[:count])
    return min(int(used[used > 0][-extents:].sum()), pool.free_map.count(0, live, pool.total))
