"""A server's work without the server, in a process of its own, which another one may kill at any moment.

python native_disk.py MODEL DIRECTORY PROMPTS    prints "ready", then a line for every answer, and goes round
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from cllm import LLM, SamplingParams
from cllm.kv.tiers.disk_tier import DiskTier

SETTINGS: dict[str, Any] = {
    "resources.max_context_length": 2048,
    "resources.kv_cache_max_memory_mb": 64,
    "backend.threads": 1,
}
EXACT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)


def settings(directory: str | None) -> dict[str, Any]:
    if directory is None:
        return SETTINGS | {"kv.disk.enabled": False}
    return SETTINGS | {"kv.disk.enabled": True, "kv.disk.directory": directory, "kv.disk.max_mb": 64}


def prompt(number: int, length: int = 700) -> list[int]:
    """Some have their beginning in common."""
    shared, own = random.Random(number % 3), random.Random(number)
    return [(shared if i < 600 else own).randrange(2, 320) for i in range(length)]


def slow(tier: DiskTier, blocks: int) -> float:
    """In place of `DiskTier.compute_seconds`: a model this small is computed faster than any disk is read."""
    return 60.0


def main(model: str, directory: str, prompts: int) -> None:
    DiskTier.compute_seconds = slow  # type: ignore[method-assign]
    with LLM(model, backend="native", settings=settings(directory)) as llm:
        print("ready", flush=True)
        while True:
            for number in range(prompts):
                (answer,) = llm.generate([prompt(number)], EXACT)
                print(json.dumps([number, answer.token_ids, answer.cached_tokens]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
