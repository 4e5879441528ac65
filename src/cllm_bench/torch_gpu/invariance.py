"""Batch-invariant mode: the same answers to the bit whatever runs beside them, what that costs, and how often the fast
mode chooses another token.

For the last, the fast mode continues the texts that the invariant mode wrote. Where it chooses another token, that
position counts as different, and it goes on behind the invariant mode's token: so every position is compared after the
same text, and with the steps that answers are made of.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

from cllm import SamplingParams

from .models import config_of
from .speed import many_at_once, one_stream
from .work import Bench, Keep, Measures, Place, engine, greedy, random_prompts

INVARIANT = {"backend__torch__batch_invariant": True}
_MOST_ROUNDS = 40


async def invariance(place: Place, keep: Keep) -> None:
    requests = mixed_requests(place)
    texts = random_prompts(_vocabulary(place), place.sizes.some, place.sizes.stream_in, "compared")
    async with engine(place.settings_for("8B", **INVARIANT)) as bench:
        together = (await bench.ask(*requests)).answers
        alone = [(await bench.ask([prompt], [params])).answers[0] for prompt, params in zip(*requests, strict=True)]
        written = (await bench.ask_alike(texts, place.sizes.stream_out)).answers
        keep("invariant alone", _differing(together, alone))
        keep("invariant one stream", await one_stream(bench, place))
        keep("invariant many", await many_at_once(bench, place))
        token_bytes = bench.llm.bytes_per_token
    small = _small_pool_mb(requests, token_bytes)
    settings = {"resources__kv_cache_max_memory_mb": small, "scheduler__max_step_tokens": 96, **INVARIANT}
    async with engine(place.settings_for("8B", **settings)) as bench:
        crowded = (await bench.ask(*requests)).answers
        preempted = bench.llm.executor.snapshot().preemptions
        keep("invariant in a small pool", _differing(together, crowded) | {"preemptions": preempted, "pool_mb": small})
    async with engine(place.settings_for("8B")) as bench:
        keep("fast against invariant", await _agreement(bench, texts, written))
        keep("margins of its choices", await _margins(bench, texts))


def mixed_requests(place: Place) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and answers of many lengths; every second one is sampled, with a seed of its own."""
    source = random.Random("mixed")
    longest_prompt, longest_answer = (40, 40) if place.tiny else (500, 96)
    prompts, params = [], []
    for seed in range(place.sizes.some):
        prompts += random_prompts(_vocabulary(place), 1, source.randint(4, longest_prompt), f"mixed {seed}")
        tokens = source.randint(longest_answer // 3, longest_answer)
        sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=tokens, ignore_eos=True)
        params.append(sampled if seed % 2 else greedy(tokens))
    return prompts, params


def _vocabulary(place: Place) -> int:
    return int(config_of(place.shape("8B"))["vocab_size"])


def _small_pool_mb(requests: tuple[list[list[int]], list[SamplingParams]], token_bytes: int) -> float:
    """Room for a third of what all take in the end, so that some who have begun must go; but for the longest twice."""
    needs = [len(prompt) + (params.max_tokens or 0) for prompt, params in zip(*requests, strict=True)]
    return max(sum(needs) / 3, 2.5 * max(needs)) * token_bytes / (1 << 20)


def _differing(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Measures:
    different = [index for index, pair in enumerate(zip(some, others, strict=True)) if pair[0] != pair[1]]
    return {"requests": len(some), "different": len(different), "which": different[:8]}


async def _agreement(bench: Bench, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Measures:
    done = [0] * len(texts)
    different = 0
    for _ in range(_MOST_ROUNDS):
        open_ones = [at for at, text in enumerate(texts) if done[at] < len(text)]
        if not open_ones:
            break
        starts = [[*prompts[at], *texts[at][: done[at]]] for at in open_ones]
        lengths = [greedy(len(texts[at]) - done[at]) for at in open_ones]
        for at, answer in zip(open_ones, (await bench.ask(starts, lengths)).answers, strict=True):
            same = _common(answer, texts[at][done[at] :])
            done[at] += same
            if done[at] < len(texts[at]):
                different += 1
                done[at] += 1
    positions = sum(done)
    return {
        "positions": positions,
        "different": different,
        "agreement_percent": 100 * (1 - different / positions),
    }


async def _margins(bench: Bench, prompts: Sequence[Sequence[int]]) -> Measures:
    """By how much the best logit is above the second: a model that is never undecided would agree with anything."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)
    margins = []
    for generation in [bench.llm.submit(prompt, params) for prompt in prompts]:
        async for delta in generation:
            margins += [each.top[0][1] - each.top[1][1] for each in delta.logprobs or ()]
    return {
        "median": median(margins),
        "below_0.1_percent": 100 * sum(margin < 0.1 for margin in margins) / len(margins),
    }


def _common(some: Sequence[int], others: Sequence[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others))
    )
