"""What a prompt that was computed ahead saves: time to the first token under a warm prefix, against a cold one.

    python src/cllm_bench/scripts/warm.py --tokens 1000 --repeats 10

In turns: a prompt whose beginning nobody has seen, and one whose beginning was warmed and pinned just before. Both
begin with so many tokens of their own, and end with the same short question. Nothing is kept on disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from statistics import median
from time import perf_counter

from cllm.config import load_config
from cllm.engine.params import SamplingParams
from cllm.llm import AsyncLLM
from cllm.tasks.warm import warm

QUESTION = "\nIn one word, what is this about?"


async def first_token_s(llm: AsyncLLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens of the prompt were cached."""
    started = perf_counter()
    async with llm.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0)) as generation:
        async for _ in generation:
            return perf_counter() - started, generation.cached_tokens
    raise SystemExit("there was no token")


async def measure(llm: AsyncLLM, tokens: int, repeats: int) -> dict[str, float]:
    draw = random.Random(1)
    question = llm.tokenizer.encode(QUESTION, add_bos=False)
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    for turn in range(repeats + 1):
        for role, taken in seconds.items():
            beginning = [draw.randrange(llm.shape.n_vocab // 2, llm.shape.n_vocab) for _ in range(tokens)]
            if role == "warm":
                done = await warm(llm, beginning, pin=True, ttl_s=60.0)
                if done.pin_id is None:
                    raise SystemExit(f"it was not pinned: {done.refusal}")
                await llm.unpin(done.pin_id)
            took, cached = await first_token_s(llm, beginning + question)
            if (cached > 0) != (role == "warm"):
                raise SystemExit(f"{cached} tokens of a {role} prompt were cached")
            if turn:  # the first one is for getting going
                taken.append(took)
    cold, warmed = median(seconds["cold"]), median(seconds["warm"])
    return {"tokens": tokens, "cold_ms": 1e3 * cold, "warm_ms": 1e3 * warmed, "ratio": warmed / cold}


async def run(args: argparse.Namespace) -> dict[str, float]:
    settings = {"model.name": args.model, "backend.type": args.backend, "kv.disk.enabled": False}
    async with AsyncLLM(load_config(overrides=settings).config) as llm:
        return await measure(llm, args.tokens, args.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=10)
    found = asyncio.run(run(parser.parse_args()))
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
