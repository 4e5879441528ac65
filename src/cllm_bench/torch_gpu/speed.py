"""Speed through the whole engine: scheduler, paged memory, backend, and the text that comes out."""

from __future__ import annotations

from statistics import median

from .idle import idle_share
from .work import Bench, Keep, Measures, Place, engine


async def one_stream(bench: Bench, place: Place) -> Measures:
    """Generated tokens over all the time that one request takes, its prompt included."""
    sizes = place.sizes
    await bench.ask_alike(bench.prompts(1, sizes.stream_in, "warm one"), sizes.stream_out)
    rates, first, steps = [], [], []
    for repeat in range(sizes.repeats + 2):
        run = await bench.ask_alike(bench.prompts(1, sizes.stream_in, f"one {repeat}"), sizes.stream_out)
        rates.append(run.rate)
        first += run.first_s
        steps.append(bench.log.decode_rate(1)[0])
    return {"tokens_per_s": median(rates), "decode_tokens_per_s": median(steps), "first_token_s": median(first)}


async def many_at_once(bench: Bench, place: Place) -> Measures:
    """All requests come at the same moment. Steps in which all of them decode are also counted by themselves: their
    mean context is one and a half times the prompt."""
    sizes = place.sizes
    await bench.ask_alike(bench.prompts(sizes.many, sizes.stream_in, "warm many"), sizes.stream_out)
    runs = []
    for repeat in range(sizes.repeats):
        run = await bench.ask_alike(bench.prompts(sizes.many, sizes.stream_in, f"many {repeat}"), sizes.stream_out)
        rate, steps = bench.log.decode_rate(sizes.many)
        prompt_steps = [step for step in bench.log.steps if step.prompt_tokens]
        runs.append(
            {
                "tokens_per_s": run.rate,
                "seconds": run.seconds,
                "decode_tokens_per_s": rate,
                "decode_steps": steps,
                "steps": len(bench.log.steps),
                "steps_with_prompts": len(prompt_steps),
                "seconds_with_prompts": sum(step.seconds for step in prompt_steps),
                "first_token_median_s": median(run.first_s),
            }
        )
    return _middle(runs, "tokens_per_s")


async def prefill(bench: Bench, place: Place) -> Measures:
    """Prompts that come together, until each has its first token."""
    sizes = place.sizes
    await bench.ask_alike(bench.prompts(sizes.prompts, sizes.long_prompt, "warm prefill"), 1)
    runs = []
    for repeat in range(sizes.repeats):
        run = await bench.ask_alike(bench.prompts(sizes.prompts, sizes.long_prompt, f"prefill {repeat}"), 1)
        tokens = sizes.prompts * sizes.long_prompt
        runs.append({"tokens_per_s": tokens / run.seconds, "seconds": run.seconds, "steps": len(bench.log.steps)})
    return _middle(runs, "tokens_per_s")


async def shared_prompt(bench: Bench, place: Place) -> Measures:
    """Users who come at once with a long prompt in common and a short question of their own, against as many with
    different prompts of that length."""
    sizes, own, out = place.sizes, 24, 16
    length = sizes.shared_prompt + own
    await bench.ask_alike(bench.prompts(sizes.some, length // 4, "warm shared"), out)
    different = await bench.ask_alike(bench.prompts(sizes.some, length, "different"), out)
    shared = bench.prompts(1, sizes.shared_prompt, "shared")[0]
    questions = bench.prompts(sizes.some, own, "questions")
    same = await bench.ask_alike([shared + question for question in questions], out)
    computed = sum(step.prompt_tokens for step in bench.log.steps) - sizes.some * own
    return {
        "users": sizes.some,
        "prompt_tokens": sizes.shared_prompt,
        "computed_tokens": computed,
        "cached_tokens": sum(same.cached),
        "times_computed": computed / sizes.shared_prompt,
        "seconds": same.seconds,
        "seconds_for_different_prompts": different.seconds,
    }


def _middle(runs: list[Measures], key: str) -> Measures:
    """The median run, with the figures of all."""
    ordered = sorted(runs, key=lambda run: run[key])
    return ordered[len(ordered) // 2] | {"all": [run[key] for run in runs]}


async def speed_8b(place: Place, keep: Keep) -> None:
    async with engine(place.settings_for("8B")) as bench:
        keep("8B one stream", await one_stream(bench, place))
        keep("8B many", await many_at_once(bench, place))
        keep("8B prefill", await prefill(bench, place))
        keep("8B shared prompt", await shared_prompt(bench, place))
        if place.on_gpu:
            keep("8B idle", await idle_share(bench, place))


async def speed_fp8(place: Place, keep: Keep) -> None:
    async with engine(place.settings_for("8B", backend__torch__dtype="fp8")) as bench:
        keep("8B fp8 one stream", await one_stream(bench, place))
        keep("8B fp8 many", await many_at_once(bench, place))


async def speed_1b(place: Place, keep: Keep) -> None:
    async with engine(place.settings_for("1B")) as bench:
        keep("1B one stream", await one_stream(bench, place))
        keep("1B many", await many_at_once(bench, place))
