"""Does a step cost more when more is cached? The same requests on caches of all sizes, filled to the brim before."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cllm.kv.sequence import KVSequence
from cllm_bench.pages.plots import LinePlot, Plot, Series
from cllm_bench.simulate.cluster import Cluster, without_garbage_collection
from cllm_bench.simulate.cost import CostModel
from cllm_bench.simulate.managers import SimulatedManager
from cllm_bench.simulate.settings import Settings
from cllm_bench.simulate.synthetic import Shape, SyntheticTrace

_FILLER_BLOCKS = 32
"""Blocks of the sequences that fill the cache."""

_LOAD = 0.6
"""Arrivals in requests a second, times the seconds one takes alone: how busy the server is."""


@dataclass(frozen=True)
class ScalePoint:
    blocks: int
    single_step_us: float
    """CPU time of a step, all of them taken one by one."""
    forwarded_step_us: float
    """The same with steps taken together where nothing is decided."""
    evicted_blocks: int
    fill_s: float
    steps: int


def measure_scale(
    blocks: Sequence[int], cost: CostModel, *, requests: int, on_point: Callable[[ScalePoint], None]
) -> list[ScalePoint]:
    points = []
    for count in blocks:
        point = _measure(count, cost, requests)
        points.append(point)
        on_point(point)
    return points


def _measure(blocks: int, cost: CostModel, requests: int) -> ScalePoint:
    settings = Settings(blocks=blocks, threshold=1.0, max_running=16)
    shape = Shape(prompt="lognormal:160:0.6", output="lognormal:64:0.6", longest=1024)
    alone = 250 * cost.prompt_token_s + 80 * (cost.step_s + cost.row_s)
    trace = SyntheticTrace("poisson", requests, _LOAD / alone, shape, seed=0)
    step_us = {}
    for fast_forward in (False, True):
        cluster = Cluster(trace, settings, cost, fast_forward=fast_forward)
        kv = cluster.servers[0].kv
        with without_garbage_collection():
            started = time.process_time()
            _fill(kv, settings)
            filled = time.process_time()
            cluster.run()
            step_us[fast_forward] = (time.process_time() - filled) / cluster.tally.steps * 1e6
        evicted = kv.usage().evictions
    return ScalePoint(blocks, step_us[False], step_us[True], evicted, filled - started, cluster.tally.steps)


def _fill(kv: SimulatedManager, settings: Settings) -> None:
    """Cached sequences that nobody asks for again, until nothing is free."""
    for tokens in _fillers(settings):
        sequence = KVSequence(tokens)
        if kv.admit(sequence) is None:
            raise AssertionError("an empty cache has no room")
        sequence.num_computed = len(tokens)
        kv.commit(sequence)
        kv.release(sequence)


def _fillers(settings: Settings) -> Iterator[array[int]]:
    size = _FILLER_BLOCKS * settings.block_size
    # Negative tokens, which no trace has. They repeat at sizes that no machine has.
    for number in range(settings.blocks // _FILLER_BLOCKS):
        first = -1 - number * size % (1 << 31)
        tokens: array[int] = array("i")
        tokens.frombytes(np.arange(first, first - size, -1, dtype=np.int64).astype(np.int32).tobytes())
        yield tokens


def plot_scale(points: Sequence[ScalePoint]) -> Plot:
    alone = [(float(point.blocks), point.single_step_us) for point in points]
    together = [(float(point.blocks), point.forwarded_step_us) for point in points]
    return LinePlot(
        title="Cost of a simulated step",
        series=[
            Series("every step alone", alone, 0, "both"),
            Series("steps taken together where nothing is decided", together, 1, "both"),
        ],
        x_label="KV blocks, all of them in use or cached",
        y_label="CPU time per simulated step, us",
        log_x=True,
    )


def points_to_json(points: Sequence[ScalePoint]) -> list[dict[str, Any]]:
    return [asdict(point) for point in points]
