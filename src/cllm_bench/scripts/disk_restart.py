"""The next turn of a chat after a restart, and what answers notice while K/V are written behind them.

    python src/cllm_bench/scripts/disk_restart.py --tokens 4000 --rounds 3 --json restart.json

Restart: a server computes a chat of so many tokens, and ends. Then, in turns, the next message is asked of a new server
that finds the K/V on disk, and of one that keeps nothing. Each is a process of its own; with --cold the files are
dropped from the system's memory before. Times are those of the first token; answers must be equal to the bit of every
log probability.

Writing: K/V are written while answers are generated, 2 GB of them: those of a prompt, offered again and again by other
names. In turns of some seconds there is nothing to write, and more than there is time for; the gaps between tokens of
the one stand beside those of the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from array import array
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from cllm import LLM, SamplingParams
from cllm.kv.paged.disk_offload import OffloadCandidate
from cllm.kv.tiers.disk_tier import DiskTier

TURN = 20
"""Tokens of the next message."""
ANSWER = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
STREAM_TOKENS = 1000
"""The length of an answer beside which K/V are written; then the next one begins."""
QUIET_S, WRITING_S = 5.0, 10.0
"""How long streams are watched with nothing to write, and with something, in turns."""


def chat(tokens: int, number: int = 0) -> list[int]:
    return [(index * 7919 + number * 131) % 40_000 + 100 for index in range(tokens)]


def opened(args: argparse.Namespace, directory: str | None) -> LLM:
    keys: dict[str, Any] = {"kv.disk.enabled": directory is not None, "resources.max_context_length": 8192}
    if directory is not None:
        keys |= {"kv.disk.directory": directory, "kv.disk.max_mb": 8192}
    return LLM(args.model, backend=args.backend, settings=keys)


def ask(args: argparse.Namespace, directory: str | None, tokens: int) -> dict[str, Any]:
    with opened(args, directory) as llm:
        (answer,) = llm.generate([chat(tokens)], ANSWER)
        assert answer.logprobs is not None
        bits = [(each.token_id, each.logprob, each.top) for each in answer.logprobs]
        return {"ttft_s": answer.timings.ttft_s, "cached": answer.cached_tokens, "bits": repr(bits)}


def elsewhere(args: argparse.Namespace, directory: str | None, tokens: int) -> dict[str, Any]:
    """In another process."""
    command = [sys.executable, __file__, "--one", directory or "", "--tokens", str(tokens)]
    command += ["--model", args.model, "--backend", args.backend]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def drop(directory: str) -> None:
    for path in Path(directory).rglob("*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def restart(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        elsewhere(args, directory, args.tokens)
        rounds = []
        for _ in range(args.rounds):
            if args.cold:
                drop(directory)
            loaded = elsewhere(args, directory, args.tokens + TURN)
            computed = elsewhere(args, None, args.tokens + TURN)
            if args.backend == "native":
                assert loaded["bits"] == computed["bits"], "the answers differ"
            rounds.append((loaded["ttft_s"], computed["ttft_s"], loaded["cached"]))
    loaded_s, computed_s = (median(column) for column in list(zip(*rounds, strict=True))[:2])
    return {
        "loaded_ttft_s": loaded_s,
        "computed_ttft_s": computed_s,
        "ratio": loaded_s / computed_s,
        "cached_tokens": rounds[0][2],
    }


class Streams:
    """Answers that are generated all the time, side by side, and when each of their tokens came to the event loop, from
    where a server sends them."""

    def __init__(self, llm: LLM, streams: int) -> None:
        self._llm = llm
        self._moments: list[list[tuple[int, float]]] = [[] for _ in range(streams)]
        """For each stream: the number of the answer, and when a token of it came."""
        self._stopping = False
        self._tasks = [llm._begin(self._run(number)) for number in range(streams)]

    async def _run(self, number: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=STREAM_TOKENS, ignore_eos=True)
        for answer in count():
            async with self._llm._llm.submit([11 + number] * 40, params) as generation:
                async for _ in generation:
                    self._moments[number].append((answer, time.perf_counter()))
                    if self._stopping:
                        return

    def gaps(self, seconds: float) -> list[float]:
        """Between the tokens of an answer that come from now on, for so long."""
        starts = [len(moments) for moments in self._moments]
        time.sleep(seconds)
        return [
            after[1] - before[1]
            for moments, start in zip(self._moments, starts, strict=True)
            for before, after in pairwise(moments[start:])
            if before[0] == after[0]
        ]

    def stop(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.result()


class Feed:
    """Offers the K/V of one prompt by ever other names: as many bytes as are wanted, by the way that all others go."""

    def __init__(self, tier: DiskTier, tokens: list[int]) -> None:
        self._tier = tier
        whole = len(tokens) // tier.block_tokens * tier.block_tokens
        self._key = array("i", tokens[:whole]).tobytes()
        self._number = 0
        self.bytes = whole // tier.block_tokens * tier.block_bytes

    def offers(self, count: int) -> list[OffloadCandidate]:
        model_store = self._tier.model_store
        assert model_store is not None
        made = []
        for _ in range(count):
            self._number += 1
            offer = OffloadCandidate(b"", self._key, 0)
            offer.names = self._tier.names(model_store, b"%d" % self._number, self._key)
            made.append(offer)
        return made


def writing(args: argparse.Namespace) -> dict[str, Any]:
    """Streams run all the time; in turns, nothing is offered to the disk, and more than it is given time to write."""
    found: dict[str, list[float]] = {"quiet": [], "writing": []}
    with tempfile.TemporaryDirectory(dir=args.directory) as directory, opened(args, directory) as llm:
        parts, engine = llm._llm._parts, llm._llm._engine
        assert parts is not None and parts.disk is not None and engine is not None
        store, keeping = parts.disk.store, engine.scheduler.kv._offloader
        llm.generate([chat(args.tokens)], SamplingParams(max_tokens=1))
        while len(keeping):
            time.sleep(0.1)
        store.flush()
        feed = Feed(parts.disk._tier, chat(args.tokens))
        streams = Streams(llm, args.streams)
        time.sleep(2.0)
        began, written, busy_s = time.perf_counter(), 0, 0.0
        while written < args.mb << 20 and time.perf_counter() - began < args.seconds:
            found["quiet"] += streams.gaps(QUIET_S)
            names = feed.offers(max(1, (512 << 20) // feed.bytes))
            engine.call(lambda names=names: keeping.take(names)).result()
            before = store.writer.speed.total
            found["writing"] += streams.gaps(WRITING_S)
            busy_s += WRITING_S
            written += store.writer.speed.total - before
            engine.call(keeping.clear).result()
            while store.writer.queued_bytes:
                time.sleep(0.05)
        streams.stop()
    result: dict[str, Any] = {"written_mb": written / 1e6, "mb_per_s": written / 1e6 / busy_s}
    for kind, values in found.items():
        values.sort()
        result |= {f"{kind}_p50_ms": 1e3 * median(values), f"{kind}_p99_ms": 1e3 * values[int(0.99 * len(values))]}
        result[f"{kind}_tokens"] = len(values)
    result["p99_ratio"] = result["writing_p99_ms"] / result["quiet_p99_ms"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--mb", type=int, default=2048, help="MiB to write behind running streams")
    parser.add_argument("--streams", type=int, default=2, help="that run meanwhile")
    parser.add_argument("--seconds", type=float, default=400, help="for writing behind streams, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="where the K/V are kept meanwhile (a temporary directory there)")
    parser.add_argument("--cold", action="store_true", help="read from the disk, not from the system's memory")
    parser.add_argument("--only", choices=["restart", "writing"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(ask(args, args.one or None, args.tokens)))
        return
    results = {
        name: work(args) for name, work in (("restart", restart), ("writing", writing)) if args.only in (None, name)
    }
    for name, values in results.items():
        print(name, ", ".join(f"{key} {value:.3f}" for key, value in values.items()))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
