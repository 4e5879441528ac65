"""llama.cpp with a disk, in a process of its own, which another one may kill at any moment.

python llama_disk.py MODEL DIRECTORY SEED    prints "ready", a line for every answer, "done", and waits for its end

Bits of llama.cpp depend on how a prompt is divided among steps, so here it never is, but where its cached part ends.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from cllm import LLM, SamplingParams
from cllm.generation import Completion
from cllm.kv.tiers.disk_tier import DiskTier
from native_disk import slow

PROMPTS, TOKENS, CACHED = 6, 700, 688
"""688 is all that whole blocks have of a prompt without its last token."""

EXACT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)


def opened(model: str, directory: str | None, **others: Any) -> LLM:
    settings: dict[str, Any] = {
        "resources.max_context_length": 1024,
        "resources.kv_cache_max_memory_mb": 4,
        "backend.llama_cpp.n_seq_max": 2,
        "scheduler.max_running": 2,
        "scheduler.max_step_tokens": 1024,
        "scheduler.prefill_target_ms": 1e9,
        "backend.threads": 1,
        "kv.disk.enabled": directory is not None,
        **({} if directory is None else {"kv.disk.directory": directory, "kv.disk.max_mb": 64}),
        **others,
    }
    llm = LLM(model, backend="llama_cpp", settings=settings)
    llm.generate([prompt(99)[:8]], EXACT)  # until something was measured, prompts are divided
    return llm


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(2, 320) for _ in range(TOKENS)]


def alike(number: int) -> list[int]:
    """As long as the prompt of that number; they have their first 688 tokens in common."""
    return prompt(number)[:CACHED] + [1] * (TOKENS - CACHED)


def bits(answer: Completion) -> Any:
    assert answer.logprobs is not None
    return json.loads(json.dumps([[each.token_id, each.logprob, each.top] for each in answer.logprobs]))


def main(model: str, directory: str, seed: int) -> None:
    DiskTier.compute_seconds = slow  # type: ignore[method-assign]
    order = list(range(PROMPTS))
    random.Random(seed).shuffle(order)
    with opened(model, directory) as llm:
        print("ready", flush=True)
        for number in order:
            (answer,) = llm.generate([prompt(number)], EXACT)
            print(json.dumps([number, answer.cached_tokens, bits(answer)]), flush=True)
        print("done", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
