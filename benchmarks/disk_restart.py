"""The next turn of a chat after a restart, and what answers notice while K/V are written behind them.

    python benchmarks/disk_restart.py --tokens 4000 --rounds 3 --json restart.json

Restart: a server computes a chat of so many tokens, and ends. Then, in turns, the next message is asked of a new server
that finds the K/V on disk, and of one that keeps nothing. Each is a process of its own; with --cold the files are
dropped from the system's memory before. Times are those of the first token; answers must be equal to the bit of every
log probability.

Writing: the K/V of several prompts wait to be written while an answer is generated; the gaps between its tokens stand
beside those of answers with nothing to write.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from cllm import LLM, SamplingParams

TURN = 20
"""Tokens of the next message."""
ANSWER = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
STREAM_TOKENS = 250


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


def gaps(llm: LLM, number: int) -> list[float]:
    params = SamplingParams(temperature=0, max_tokens=STREAM_TOKENS, ignore_eos=True)
    moments = [time.perf_counter() for _ in llm.stream([11 + number] * 40, params)]
    return [after - before for before, after in pairwise(moments)]


def writing(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[float]] = {"quiet": [], "writing": []}
    written = 0
    with tempfile.TemporaryDirectory(dir=args.directory) as directory, opened(args, directory) as llm:
        parts = llm._llm._parts
        assert parts is not None and parts.disk is not None
        tier, store = parts.disk._tier, parts.disk.store
        for number in range(args.rounds):
            space, tier._space = tier._space, None  # what is computed now waits
            for prompt in range(args.prompts):
                llm.generate([chat(args.tokens, number * args.prompts + prompt)], SamplingParams(max_tokens=1))
            found["quiet"] += gaps(llm, 2 * number)
            before = store.writer.speed.total
            assert space is not None
            tier.attach(space)
            found["writing"] += gaps(llm, 2 * number + 1)
            written += store.writer.speed.total - before
            store.flush()
    result: dict[str, Any] = {"written_mb": written / 1e6}
    for kind, values in found.items():
        values.sort()
        result |= {f"{kind}_p50_ms": 1e3 * median(values), f"{kind}_p99_ms": 1e3 * values[int(0.99 * len(values))]}
    result["p99_ratio"] = result["writing_p99_ms"] / result["quiet_p99_ms"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=4, help="whose K/V are written behind an answer")
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
