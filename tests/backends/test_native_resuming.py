"""Answers of the real model that are cut off and go on in another engine: the same bits as without a cut."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cllm import AsyncLLM, ContextWindow, SamplingParams
from cllm.config import load_config
from cllm.structured.structure import Structure
from llm_kit import LONG, PROMPTS
from resume_kit import Outputs, cut_off, queued
from thorough import slow

pytestmark = pytest.mark.model

SETTINGS: dict[str, Any] = {
    "backend.type": "native",
    "resources.max_context_length": 1024,
    "resources.kv_cache_max_memory_mb": 100,
}
OTHER_SETTINGS = SETTINGS | {"scheduler.max_step_tokens": 37, "kv.compaction": "always"}
SCHEMA = """{"type": "object", "properties": {"what_it_is": {"type": "string", "maxLength": 12},
"how_many": {"type": "integer", "minimum": 0, "maximum": 50}}, "required": ["what_it_is", "how_many"],
"additionalProperties": false}"""
KINDS = {
    "greedy": SamplingParams(temperature=0, seed=1, max_tokens=24, ignore_eos=True, logprobs=3),
    "penalised": SamplingParams(
        temperature=0, seed=1, max_tokens=24, logprobs=1, repetition_penalty=1.2, frequency_penalty=0.4, min_tokens=20
    ),
    "several": SamplingParams(temperature=0.9, top_p=0.95, seed=7, n=3, max_tokens=20, logprobs=1),
    "structured": SamplingParams(
        temperature=0.9, seed=3, n=2, max_tokens=60, structured=Structure("json_schema", SCHEMA)
    ),
}
WINDOW = SamplingParams(
    temperature=0, seed=1, max_tokens=120, ignore_eos=True, logprobs=2, context_window=ContextWindow(128, 16)
)


def opened(settings: dict[str, Any]) -> AsyncLLM:
    return AsyncLLM(load_config(None, settings).config)


async def ask(llm: AsyncLLM, prompt: str, params: SamplingParams, generated: Any = None) -> Outputs:
    grammar = None if params.structured is None else await llm.text.compile(params.structured)
    sink = queued(llm, prompt, params, grammar=grammar, generated=generated)
    await sink.all()
    return sink


async def empty_cache(llm: AsyncLLM) -> None:
    assert llm.executor.engine is not None
    await asyncio.wrap_future(llm.executor.engine.call(llm.executor.engine.scheduler.kv.reset))


@contextmanager
def engine_held(llm: AsyncLLM) -> Iterator[None]:
    """The engine begins no step until the end of this, so that what is submitted meanwhile starts together."""
    assert llm.executor.engine is not None
    go_on = threading.Event()
    llm.executor.engine.call(go_on.wait)
    try:
        yield
    finally:
        go_on.set()


async def assert_the_same_bits(
    one: AsyncLLM, other: AsyncLLM, prompt: str, params: SamplingParams, cuts: list[float]
) -> None:
    answers = (await ask(one, prompt, params)).told()
    for number, cut in enumerate(cuts):
        # Of several answers each is cut elsewhere, and the last one was complete.
        places = [int((cut + index / 2) % 1.0 * len(answer)) for index, answer in enumerate(answers[:2])]
        places += [len(answer) for answer in answers[2:]]
        if number % 2:
            await empty_cache(other)
        found = await ask(other, prompt, params, cut_off(answers, places))
        expected = [answer[place:] for answer, place in zip(answers, places, strict=True)]
        assert found.told() == expected, f"{prompt!r} cut at {places}"


async def test_the_same_bits() -> None:
    async with opened(SETTINGS) as one, opened(OTHER_SETTINGS) as other:
        for kind, params in zip(KINDS, KINDS.values(), strict=True):
            prompt = PROMPTS[list(KINDS).index(kind)]
            await assert_the_same_bits(one, other, prompt, params, [0.05, 0.3, 0.5, 0.95])
        snapshot = other.executor.snapshot()
        assert snapshot.kv.referenced == 0 and snapshot.kv.hit_tokens > 0


@slow
async def test_the_same_bits_in_a_rolling_window() -> None:
    """The prompt alone is longer than the window, and much is dropped before and after the cut."""
    async with opened(SETTINGS) as one, opened(OTHER_SETTINGS) as other:
        await assert_the_same_bits(one, other, LONG[:1500], WINDOW, [0.1, 0.6, 0.99])
        assert other.executor.snapshot().dropped_tokens > 0


async def test_the_same_bits_among_others_and_preempted() -> None:
    # Room for 12 blocks: the answers of several requests do not fit.
    tight = {"resources.kv_cache_max_memory_mb": 12 * 16 * 23_040 / 2**20 + 0.01, "scheduler.watermark": 0.0}
    params = KINDS["greedy"]
    async with opened(SETTINGS) as one, opened(SETTINGS | tight) as other:
        wholes = [(await ask(one, prompt, params)).told() for prompt in PROMPTS]
        cuts = [(3 * number) % 24 for number in range(len(PROMPTS))]
        with engine_held(other):
            answers = asyncio.gather(
                *(
                    ask(other, prompt, params, cut_off(whole, [cut]))
                    for prompt, whole, cut in zip(PROMPTS, wholes, cuts, strict=True)
                )
            )
            await asyncio.sleep(0)  # all are submitted
        sinks = await answers
        for sink, whole, cut in zip(sinks, wholes, cuts, strict=True):
            assert sink.told() == [whole[0][cut:]]
        assert other.executor.snapshot().preemptions > 0
