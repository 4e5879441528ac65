"""Slots on demand with llama.cpp: what a change of their number costs, and what it saves.

    python src/cllm_bench/scripts/llama_slots.py --json slots.json

First a context of 1, 2, 4 and 8 slots with running sequences is rebuilt with twice as many, and with one. Then two
servers are started in turn, one that takes slots on demand and one that takes all of them at the start: their resident
memory when they are ready, under eight requests at once, and after a quiet time; and how long those eight take, first
and again. Run it alone. With GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment llama.cpp's memory comes in large
pages, where the OS gives them on request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from array import array
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

from cllm.backends.base import Chunk
from cllm.backends.llama_cpp import LlamaCppBackend
from cllm.kv.ops import SlotGeometry
from cllm.machine import default_threads, read_cpus
from cllm.models.registry import resolve
from cllm_bench.client import Client
from cllm_bench.servers import start_cllm
from cllm_bench.watch import resident_mb

SLOTS, SLOT_TOKENS = 8, 8192
SIZES = (1, 2, 4, 8)
QUIET_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=500, help="in every running sequence")
    parser.add_argument("--no-servers", action="store_true", help="only the context")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    threads = default_threads(read_cpus()).count
    result: dict[str, Any] = {"rebuilds": rebuilds(threads, args.tokens, args.repeat)}
    print(f"\n{'slots':>12} {'save ms':>9} {'rebuild ms':>11} {'load ms':>9} {'MB carried':>11} {'CPU ms, all':>12}")
    for name, costs in result["rebuilds"].items():
        print(
            f"{name:>12} {costs['save']:9.1f} {costs['resize']:11.1f} {costs['load']:9.1f} {costs['mb']:11.1f} "
            f"{costs['cpu']:12.1f}"
        )
    if not args.no_servers:
        result["servers"] = asyncio.run(servers(threads, args.repeat))
        print_servers(result["servers"])
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


def print_servers(measured: dict[str, dict[str, float]]) -> None:
    on, off = measured["on demand"], measured["at the start"]
    print(f"\n{'':40} {'on demand':>10} {'at the start':>13}")
    for name in on:
        print(f"{name:40} {on[name]:10.2f} {off[name]:13.2f}")


# -- the context -----------------------------------------------------------------------------------------------------


def rebuilds(threads: int, tokens: int, repeat: int) -> dict[str, dict[str, float]]:
    """Every slot runs, and the context is rebuilt with other numbers of them; the median of each part."""
    backend = LlamaCppBackend(
        resolve("smollm2"),
        threads=threads,
        n_batch=2048,
        n_ubatch=512,
        kv_type_k="f16",
        kv_type_v="f16",
        flash_attention=True,
        mmap=True,
        mlock=False,
    )
    costs: dict[str, list[dict[str, float]]] = {}
    with backend:
        backend.allocate(SlotGeometry(SLOTS, SLOT_TOKENS, at_start=1))
        ops = backend.ops
        backend.collect([Chunk(array("i", [77] * tokens), 0, False, 0)])
        sequence = ops.save(0)
        for _ in range(repeat):
            for before in SIZES:
                for after in sorted({min(2 * before, SLOTS), 1} - {before}):
                    ops.resize(before)
                    for slot in range(before):
                        ops.load(slot, sequence)
                    kept = min(before, after)
                    started, busy = perf_counter(), thread_time()
                    saved = [ops.save(slot) for slot in range(kept)]
                    read = perf_counter()
                    ops.resize(after)
                    opened = perf_counter()
                    for slot, content in enumerate(saved):
                        ops.load(slot, content)
                    loaded = perf_counter()
                    assert [ops.length(slot) for slot in range(kept)] == [tokens] * kept
                    costs.setdefault(f"{before} -> {after}", []).append(
                        {
                            "save": 1000 * (read - started),
                            "resize": 1000 * (opened - read),
                            "load": 1000 * (loaded - opened),
                            "cpu": 1000 * (thread_time() - busy),
                            "mb": sum(content.nbytes for content in saved) / 1e6,
                        }
                    )
    return {name: {part: median(run[part] for run in runs) for part in runs[0]} for name, runs in costs.items()}


# -- servers ---------------------------------------------------------------------------------------------------------


async def servers(threads: int, repeat: int) -> dict[str, dict[str, float]]:
    runs: dict[str, list[dict[str, float]]] = {"on demand": [], "at the start": []}
    for _ in range(repeat):
        for name, measured in runs.items():
            measured.append(await one_server(threads, on_demand=name == "on demand"))
    return {name: {key: median(run[key] for run in group) for key in group[0]} for name, group in runs.items()}


async def one_server(threads: int, *, on_demand: bool) -> dict[str, float]:
    settings = {
        "backend.llama_cpp.slots_on_demand": str(on_demand).lower(),
        "backend.llama_cpp.n_seq_max": SLOTS,
        "resources.max_context_length": SLOT_TOKENS,
        "kv.release_after_s": QUIET_S,
        "kv.idle_mb": 0,
    }
    async with start_cllm("smollm2", threads, "llama_cpp", settings) as server, Client(server.url) as client:
        assert server.pid is not None
        result = {"resident when ready, MB": resident_mb(server.pid)}
        await client.complete("Hello", 4)
        for when in ("first", "again"):
            started = perf_counter()
            answers = await asyncio.gather(*(client.complete(f"{when} {n}: " + "word " * 60, 32) for n in range(SLOTS)))
            result[f"8 at once, {when}: all of them, s"] = perf_counter() - started
            result[f"8 at once, {when}: first token P50, s"] = median(answer.ttft for answer in answers)
        if error := client.first_error:
            raise RuntimeError(error)
        result["resident after 8 at once, MB"] = resident_mb(server.pid)
        await asyncio.sleep(2 * QUIET_S)
        result["resident after a quiet time, MB"] = resident_mb(server.pid)
        return result


if __name__ == "__main__":
    main()
