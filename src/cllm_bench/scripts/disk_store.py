"""How fast K/V go to disk and come back, against what the same disk does without the store.

    python src/cllm_bench/scripts/disk_store.py --directory ~/.cache --mb 1024 --json disk.json

In every round a plain file and the store write the same bytes, in turns first, and both are read again with nothing of
them in the system's memory. The plain file is written with calls of 8 MiB and one fdatasync at the end, and read with
calls of 8 MiB (what `dd bs=8M conv=fdatasync` does). The first use of a place on the disk, and of memory for it, can
cost more than the writing, above all in virtual machines: so both write new files, and the ratio of writing compares
rounds in which each was first with each other, and those in which each was second. Printed are medians over the rounds.
On a machine that does other things the ratios say how much of a core was left; the time of a core that the store takes
for each GB does not depend on that.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from cllm.kv.block_names import chain, fingerprint
from cllm.kv.disk.store import DiskStore, ModelStore

BLOCK_TOKENS, BLOCK_BYTES = 16, 16 * 23_040
"""smollm2, f16."""
CALL_BYTES = 8 << 20
CHAIN_BLOCKS = 250
"""A prompt of 4,000 tokens."""


def plain_write(path: Path, data: np.ndarray, total: int) -> float:
    began = time.perf_counter()
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    for done in range(0, total, CALL_BYTES):
        at = done % (len(data) - CALL_BYTES)
        os.write(file, data[at : at + CALL_BYTES].data)
    os.fdatasync(file)
    took = time.perf_counter() - began
    os.close(file)
    return total / took


def plain_read(path: Path, buffer: np.ndarray) -> float:
    file = os.open(path, os.O_RDONLY)
    total, began = 0, time.perf_counter()
    while got := os.readv(file, [buffer[:CALL_BYTES].data]):
        total += got
    took = time.perf_counter() - began
    os.close(file)
    return total / took


def forget(directory: Path) -> None:
    """Nothing of these files stays in the system's memory."""
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def store_write(store: DiskStore, model_store: ModelStore, chains: list[list[bytes]], blocks: np.ndarray) -> float:
    """Hand over as fast as the store takes it, until all is written."""
    began = time.perf_counter()
    for names in chains:
        done = 0
        while done < len(names):
            parent = names[done - 1] if done else model_store.root()
            kept = model_store.put(
                parent, done, names[done:], [blocks[i % len(blocks)] for i in range(done, len(names))]
            )
            done += kept
            if done < len(names):
                time.sleep(0.01)
    store.flush(600)
    return sum(map(len, chains)) * BLOCK_BYTES / (time.perf_counter() - began)


def store_read(model_store: ModelStore, chains: list[list[bytes]], buffer: np.ndarray) -> tuple[float, float]:
    """Bytes per second over all chains, and the median seconds of one."""
    began, each = time.perf_counter(), []
    for names in chains:
        start = time.perf_counter()
        ticket = model_store.load(names, buffer[: len(names)])
        ticket.wait()
        assert ticket.complete, ticket.error
        each.append(time.perf_counter() - start)
    return sum(map(len, chains)) * BLOCK_BYTES / (time.perf_counter() - began), median(each)


def one_round(place: Path, number: int, mb: int, blocks: np.ndarray) -> dict[str, float]:
    flat, kv, plain = blocks.reshape(-1), place / f"kv{number}", place / f"plain{number}"
    count = max(1, (mb << 20) // (CHAIN_BLOCKS * BLOCK_BYTES))
    total = count * CHAIN_BLOCKS * BLOCK_BYTES
    figures: dict[str, float] = {}
    if number % 2 == 0:
        figures["plain_write"] = plain_write(plain, flat, total)
    store = DiskStore(kv, limit=4 * total)
    model = fingerprint(b"benchmark", {"round": number})
    model_store = store.open_model(
        model, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, about={"model": "benchmark"}
    )
    model_store.ready(10)
    draw = np.random.default_rng(number)
    chains = [
        chain(model_store.root(), draw.integers(0, 49_000, CHAIN_BLOCKS * BLOCK_TOKENS, np.int32), BLOCK_TOKENS)
        for _ in range(count)
    ]
    busy = time.process_time()
    figures["store_write"] = store_write(store, model_store, chains, blocks)
    figures["write_cpu_s_per_gb"] = (time.process_time() - busy) / total * 1e9
    if number % 2:
        figures["plain_write"] = plain_write(plain, flat, total)
    # Begins with a page, as the arena does.
    buffer = np.frombuffer(mmap.mmap(-1, CHAIN_BLOCKS * BLOCK_BYTES), np.uint8).reshape(CHAIN_BLOCKS, BLOCK_BYTES)
    buffer.fill(1)
    forget(place)
    figures["plain_read"] = plain_read(plain, buffer.reshape(-1))
    forget(place)
    busy = time.process_time()
    figures["store_read"], figures["chain_s"] = store_read(model_store, chains, buffer)
    figures["read_cpu_s_per_gb"] = (time.process_time() - busy) / total * 1e9
    figures["store_read_cached"], figures["chain_cached_s"] = store_read(model_store, chains[-1:], buffer)
    store.close()
    began = time.perf_counter()
    store = DiskStore(kv, limit=4 * total)
    store.open_model(model, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, about={}).ready(60)
    figures["open_s"] = time.perf_counter() - began
    store.close()
    shutil.rmtree(kv)
    plain.unlink()
    return figures


def ratio(rounds: list[dict[str, float]], what: str) -> float:
    """The store's speed against that of the plain file when it had the same place in a round."""
    shift = 1 if what == "write" and len(rounds) > 1 else 0
    pairs = zip(rounds[shift:] or rounds, rounds, strict=False)
    return median(later[f"store_{what}"] / earlier[f"plain_{what}"] for later, earlier in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--mb", type=int, default=1024, help="MiB in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    blocks = np.random.default_rng(0).integers(0, 256, (CHAIN_BLOCKS, BLOCK_BYTES), np.uint8)
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        rounds = [one_round(Path(place), number, options.mb, blocks) for number in range(options.rounds)]
    figures = {name: median(one[name] for one in rounds) for name in rounds[0]}
    for what in ("write", "read"):
        plain, store = figures[f"plain_{what}"], figures[f"store_{what}"]
        figures[f"{what}_ratio"] = ratio(rounds, what)
        print(
            f"{what}: disk {plain / 1e6:.0f} MB/s, store {store / 1e6:.0f} MB/s, ratio {figures[f'{what}_ratio']:.2f}; "
            f"{figures[f'{what}_cpu_s_per_gb']:.2f} s of a core for each GB"
        )
    print(f"4,000 tokens (92 MB): {1e3 * figures['chain_s']:.0f} ms, {1e3 * figures['chain_cached_s']:.0f} ms if the "
          f"system still has them; opening the store: {1e3 * figures['open_s']:.1f} ms")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
