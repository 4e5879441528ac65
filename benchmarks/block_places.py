"""Does it matter where the blocks of a sequence lie?

    python benchmarks/block_places.py --json places.json

Decodes the same streams over block tables whose blocks are adjacent, and over tables whose blocks are scattered at
random over an arena four times as large, in turn. If scattered ones are not slower, moving blocks together is worth
only the memory that can then go back to the system. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
from array import array
from pathlib import Path
from statistics import median
from time import perf_counter

from cllm.backends.base import Chunk
from cllm.backends.native import NativeBackend
from cllm.kv.ops import BlockGeometry
from cllm.machine import default_threads, read_cpus
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve

BLOCK_SIZE = 16


def adjacent(streams: int, blocks: int) -> list[list[int]]:
    return [list(range(stream * blocks, (stream + 1) * blocks)) for stream in range(streams)]


def scattered(streams: int, blocks: int, total: int) -> list[list[int]]:
    places = random.Random(1).sample(range(total), streams * blocks)
    return [places[stream * blocks : (stream + 1) * blocks] for stream in range(streams)]


def step_s(backend: NativeBackend, tables: list[list[int]], context: int) -> float:
    chunks = [Chunk(array("i", [7 + stream]), context, True, 0, table) for stream, table in enumerate(tables)]
    start = perf_counter()
    backend.step(chunks)
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    blocks = options.context // BLOCK_SIZE + 1
    total = 4 * options.streams * blocks
    model = GGUFModel.open(resolve(options.model))
    settings = {"instruction_set": "auto", "kv_type_k": "f16", "kv_type_v": "f16"}
    with NativeBackend(model, threads=default_threads(read_cpus()).count, **settings) as backend:
        backend.allocate(BlockGeometry(total, BLOCK_SIZE))
        assert isinstance(backend, NativeBackend)
        backend.prepare_pages(0, total)
        layouts = {
            "adjacent": adjacent(options.streams, blocks),
            "scattered": scattered(options.streams, blocks, total),
        }
        taken: dict[str, list[float]] = {name: [] for name in layouts}
        for _ in range(options.repeats):
            for name, tables in layouts.items():
                taken[name].append(step_s(backend, tables, options.context))
    ratio = median(s / a for s, a in zip(taken["scattered"], taken["adjacent"], strict=True))
    result = {
        "streams": options.streams,
        "context": options.context,
        **{f"{name}_ms": median(seconds) * 1e3 for name, seconds in taken.items()},
        **{f"{name}_best_ms": min(seconds) * 1e3 for name, seconds in taken.items()},
        "scattered_over_adjacent": ratio,
    }
    for name, value in result.items():
        print(f"{name:>24}: {value:.4g}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
