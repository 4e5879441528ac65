"""Processes that are killed while they keep K/V on disk, and the answers of those that come after them.

    python src/cllm_bench/scripts/disk_kill.py --minutes 10 --json kill.json

A process answers prompts of a chat and is killed (SIGKILL) at a random moment, again and again, all with one directory.
Every answer must be, to the bit of every log probability, that of a process that keeps nothing. Printed are the
processes that were killed, the answers that were compared, and how many tokens of them came from the disk.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cllm import LLM, SamplingParams
from cllm.kv.disk.overview import overview

ANSWER = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
PROMPTS, SHORTEST, LONGEST = 6, 600, 1100
"""Each begins like the one before it, in turns of a chat, but for two that have nothing in common with others."""


def prompt(number: int) -> list[int]:
    draw = random.Random(0 if number % 3 else number)
    length = SHORTEST + (LONGEST - SHORTEST) * number // PROMPTS
    return [draw.randrange(100, 40_000) for _ in range(length)]


def opened(args: argparse.Namespace, directory: str | None) -> LLM:
    keys: dict[str, Any] = {"kv.disk.enabled": directory is not None, "resources.max_context_length": 2048}
    if directory is not None:
        keys |= {"kv.disk.directory": directory, "kv.disk.max_mb": args.max_mb}
    return LLM(args.model, backend="native", settings=keys)


def answers(llm: LLM) -> list[str]:
    return [repr(bits) for number in range(PROMPTS) for bits, _ in [answer(llm, number)]]


def answer(llm: LLM, number: int) -> tuple[list[Any], int]:
    (found,) = llm.generate([prompt(number)], ANSWER)
    assert found.logprobs is not None
    return [(each.token_id, each.logprob, each.top) for each in found.logprobs], found.cached_tokens


def serve(args: argparse.Namespace) -> None:
    """Answer in a random order, for ever."""
    with opened(args, args.serve) as llm:
        print("ready", flush=True)
        while True:
            number = random.randrange(PROMPTS)
            bits, cached = answer(llm, number)
            print(json.dumps([number, repr(bits), cached]), flush=True)


def kill_one(args: argparse.Namespace, directory: str, expected: list[str]) -> tuple[int, int]:
    """Answers that were compared, and the tokens of them that were cached."""
    command = [sys.executable, __file__, "--serve", directory, "--model", args.model, "--max-mb", str(args.max_mb)]
    compared = cached = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            for _ in range(random.randint(1, PROMPTS)):
                number, bits, found = json.loads(process.stdout.readline())
                assert bits == expected[number], f"the answer to prompt {number} is another one"
                compared, cached = compared + 1, cached + found
            time.sleep(random.random() * 0.5)
        finally:
            process.kill()
    return compared, cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--max-mb", type=int, default=80, help="less than all prompts take, so that some have to go")
    parser.add_argument("--directory", help="where the K/V are kept meanwhile (a temporary directory there)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args)
        return
    with opened(args, None) as llm:
        expected = answers(llm)
    result = {"killed": 0, "answers": 0, "cached_tokens": 0}
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        until = time.monotonic() + 60 * args.minutes
        while time.monotonic() < until:
            compared, cached = kill_one(args, directory, expected)
            result["killed"] += 1
            result["answers"] += compared
            result["cached_tokens"] += cached
            on_disk = overview(Path(directory)).bytes
            assert on_disk <= args.max_mb << 20, f"{on_disk} bytes are more than {args.max_mb} MiB"
        with opened(args, directory) as llm:
            assert answers(llm) == expected
            counts = llm.kv()["details"]["disk"]["counts"]
    assert not counts.get("damaged"), counts
    print(", ".join(f"{key} {value}" for key, value in result.items()) + "; all answers equal to the bit")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
