"""Two models under one budget, against two servers with half of it each: how much of the prompts is found in the cache.

    python src/cllm_bench/scripts/two_models.py
    python src/cllm_bench/scripts/two_models.py --backend native --prompts 12 --words 400

Load alternates between the models in phases of `--phase` requests. Each has a set of prompts of its own, from which it
is asked at random; the budget holds a part of both sets (`--share`, 0.6). Every side gets the same requests in the same
order, and nothing is kept on disk. With `--wake` the time from a request for a model that is unloaded to its first
token is measured as well, for a short prompt and for one whose K/V come from disk; with `--busy` the time between the
tokens of an answer of one model while the other one answers and computes prompts, and while it is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Coroutine
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from cllm.config import Config, load_config
from cllm.engine.params import SamplingParams
from cllm.kv.memory import MIB
from cllm.served import ServedModel, ServedModels
from cllm_bench.stats import percentile

WORDS = ("red", "blue", "green", "dog", "cat", "house", "tree", "river", "stone", "cloud", "bread", "light")
ONE = SamplingParams(max_tokens=1, temperature=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fake", choices=["fake", "native"])
    parser.add_argument("--prompts", type=int, default=40, help="of each model")
    parser.add_argument("--words", type=int, default=200, help="of each prompt")
    parser.add_argument("--phase", type=int, default=200, help="requests to a model before it is the other's turn")
    parser.add_argument("--phases", type=int, default=6, help="0: only what follows is measured")
    parser.add_argument("--share", type=float, default=0.6, help="of both sets that the budget holds")
    parser.add_argument("--wake", type=int, default=0, metavar="TIMES", help="measure waking the model so often")
    parser.add_argument("--busy", type=int, default=0, metavar="TOKENS", help="measure gaps in answers of so many")
    asyncio.run(run(parser.parse_args()))


async def run(args: argparse.Namespace) -> None:
    if args.phases:
        await compare(args)
    if args.busy:
        for beside, gaps in (await busy(args)).items():
            p50, p99, most = (1000 * percentile(gaps, share) for share in (50, 99, 100))
            print(
                f"between tokens, {beside}: {p50:.1f} ms (median), {p99:.1f} ms (99th percentile), {most:.0f} ms (most)"
            )
    if args.wake:
        for what, took, cached in await wake(args):
            print(
                f"from asleep to the first token of {what}: {median(took):.3f} s (median of {args.wake}), "
                f"{cached} tokens from disk"
            )


async def compare(args: argparse.Namespace) -> None:
    dice = random.Random(7)
    prompts = {name: [text(dice, args.words) for _ in range(args.prompts)] for name in "ab"}
    order = [
        (name, dice.choice(prompts[name])) for phase in range(args.phases) for name in "ab"[phase % 2] * args.phase
    ]
    weights, kv = await measure(args, prompts)
    budget = args.share * 2 * kv
    print(
        f"K/V of each set {kv / MIB:.1f} MiB, budget {budget / MIB:.1f} MiB beside weights of {weights / MIB:.1f} MiB"
    )
    together = await hit_rate(args, ["a", "b"], 2 * weights + budget, order)
    apart = [
        await hit_rate(args, [name], weights + budget / 2, [each for each in order if each[0] == name]) for name in "ab"
    ]
    print(f"found in the cache: {together:.1%} with one budget, {sum(apart) / 2:.1%} with two halves")


def text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choices(WORDS, k=words))


def config_of(args: argparse.Namespace, names: list[str], budget: float, disk: str | None = None) -> Config:
    name_of = {"a": "smollm2", "b": "smollm2"} if args.backend == "native" else {"a": "a", "b": "b"}
    settings: dict[str, Any] = {
        "backend.type": args.backend,
        "models": [{"name": name_of[name], "aliases": [name]} for name in names],
        "resources.max_memory_mb": budget / MIB,
        "resources.max_context_length": 2048,
        "kv.release_after_s": None,
        "scheduler.kv_cache_eviction_threshold": 1.0,
        "kv.disk.enabled": disk is not None,
        "kv.disk.directory": disk,
    }
    return load_config(None, settings, {}).config


async def ask(models: ServedModels, served: ServedModel, prompt: str) -> int:
    """How many of the prompt's tokens were cached."""
    llm = await models.acquire(served)
    generation = llm.submit(prompt, ONE)
    async for _ in generation:
        pass
    served.release()
    return generation.cached_tokens


async def measure(args: argparse.Namespace, prompts: dict[str, list[str]]) -> tuple[int, int]:
    """Bytes of a model's weights, and of the K/V of its prompts."""
    models = ServedModels(config_of(args, ["a"], 4096 * MIB))
    await models.start()
    (served,) = models.models
    for prompt in prompts["a"]:
        await ask(models, served, prompt)
    assert served.llm is not None
    held = served.llm.kv()["bytes"]["evictable"]
    await models.shutdown(0)
    return served.estimate.weights, held


async def hit_rate(args: argparse.Namespace, names: list[str], budget: float, order: list[tuple[str, str]]) -> float:
    models = ServedModels(config_of(args, names, budget))
    await models.start()
    by_name = {served.name: served for served in models.models}
    for name, prompt in order:
        await ask(models, by_name[name], prompt)
        models.ledger.check()
    numbers = [served.llm.kv() for served in models.models if served.llm is not None]
    await models.shutdown(0)
    hits, queries = (sum(int(each[key]) for each in numbers) for key in ("hit_tokens", "query_tokens"))
    return hits / queries


async def wake(args: argparse.Namespace) -> list[tuple[str, list[float], int]]:
    with tempfile.TemporaryDirectory() as disk:
        models = ServedModels(config_of(args, ["a"], 4096 * MIB, disk))
        await models.start()
        (served,) = models.models
        found = []
        for words in (5, 1000):
            prompt, took, cached = text(random.Random(words), words), [], 0
            await ask(models, served, prompt)
            for _ in range(args.wake):
                await models.unload(served)
                started = perf_counter()
                cached = await ask(models, served, prompt)
                took.append(perf_counter() - started)
            found.append((f"a prompt of {words} words", took, cached))
        await models.shutdown(0)
    return found


async def busy(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds between tokens of answers of a: alone, and while b answers and computes one long prompt after another."""
    models = ServedModels(config_of(args, ["a", "b"], 4096 * MIB))
    await models.start()
    first, second = models.models
    dice = random.Random(11)

    async def answer(served: ServedModel) -> list[float]:
        llm = await models.acquire(served)
        params = SamplingParams(max_tokens=args.busy, temperature=0.0, ignore_eos=True)
        times = [perf_counter() async for _ in llm.submit(text(dice, 20), params)]
        served.release()
        return [after - before for before, after in pairwise(times)]

    async def others() -> None:
        while True:
            await asyncio.gather(
                answer(second), ask(models, second, text(dice, 1200 if args.backend == "native" else 300))
            )

    async def loading() -> None:
        while True:
            await models.unload(second)
            await models.load(second)

    async def beside(load: Coroutine[Any, Any, None] | None) -> list[float]:
        task = asyncio.create_task(load) if load is not None else None
        gaps = [gap for _ in range(3) for gap in await answer(first)]
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return gaps

    found = {"alone": await beside(None), "beside a busy model": await beside(others())}
    found["while a model is unloaded and loaded"] = await beside(loading())
    await models.shutdown(0)
    return found


if __name__ == "__main__":
    main()
