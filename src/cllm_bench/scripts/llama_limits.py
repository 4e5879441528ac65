"""What llama.cpp itself allows: the speed of prompt chunks by size, and the time that generating alone takes.

    python src/cllm_bench/scripts/llama_limits.py --json limits.json

The chunk speeds are why `cllm.engine.budget` prefers few large chunks. The generation times bound what a scheduler can
gain in `cllm bench prefix` (1,024 tokens in 8 streams at 740) and `chat` (2,304 in 4 at 300). Run it alone.
"""

from __future__ import annotations

import argparse
import json
from array import array
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from cllm.backends.base import Chunk
from cllm.backends.llama_cpp import LlamaCppBackend
from cllm.kv.ops import SlotGeometry, SlotOps
from cllm.machine import default_threads, read_cpus
from cllm.models.registry import resolve

CHUNKS = (16, 32, 64, 128, 256, 512)
STEPS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    backend = LlamaCppBackend(
        resolve("smollm2"),
        threads=default_threads(read_cpus()).count,
        n_batch=2048,
        n_ubatch=512,
        kv_type_k="f16",
        kv_type_v="f16",
        flash_attention=True,
        mmap=True,
        mlock=False,
    )
    with backend:
        backend.allocate(SlotGeometry(8, 1024))
        result = {
            f"chunks of {size}, tok/s": median(prompt_speed(backend, size) for _ in range(args.repeat))
            for size in CHUNKS
        }
        result["prefix: generating alone, s"] = generation_time(backend, streams=8, context=740, tokens=1024)
        result["chat: generating alone, s"] = generation_time(backend, streams=4, context=300, tokens=2304)
    for name, value in result.items():
        print(f"{name:32} {value:8.1f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


def tokens(count: int) -> array[int]:
    return array("i", np.random.default_rng(count).integers(100, 40_000, count).tolist())


def empty(backend: LlamaCppBackend) -> None:
    ops: SlotOps = backend.ops
    for slot in range(8):
        ops.remove(slot, 0)


def prompt_speed(backend: LlamaCppBackend, size: int, total: int = 512) -> float:
    empty(backend)
    started = perf_counter()
    for start in range(0, total, size):
        backend.collect([Chunk(tokens(size), start, True, 0)])
    return total / (perf_counter() - started)


def generation_time(backend: LlamaCppBackend, *, streams: int, context: int, tokens: int) -> float:
    """Seconds for `tokens` in all, reckoned from `STEPS` steps."""
    empty(backend)
    for slot in range(streams):
        backend.collect([Chunk(array("i", [77] * context), 0, False, slot)])
    started = perf_counter()
    for step in range(STEPS):
        backend.collect([Chunk(array("i", [77]), context + step, True, slot) for slot in range(streams)])
    return (perf_counter() - started) * tokens / (STEPS * streams)


if __name__ == "__main__":
    main()
