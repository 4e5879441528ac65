"""Answers by a JSON schema and free text: what do masks cost, do forced tokens pay, how long does a new schema take?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from time import perf_counter
from typing import Any

from cllm.config import load_config
from cllm.engine.params import SamplingParams
from cllm.engine.tenant import Tenant
from cllm.llm import AsyncLLM
from cllm.structured.structure import Structure
from cllm_bench.drafts.texts import CHAT, tasks
from cllm_bench.figures import OURS, Figure, Metrics, Run, own, times_the_peer
from cllm_bench.workloads.base import SETTLE_S, LocalWorkload, Setup, busy_at_rest

FREE = "free text"
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.7, top_p=0.95, seed=7)
"""Greedy answers of a small model soon repeat themselves, and drafts make those as fast as forced tokens."""

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Structured(LocalWorkload):
    """One engine in this process gets the same prompts in turn, with a schema and without. Every request is a
    stranger's, so that none finds the prompt of the one before."""

    streams: int = 32
    prompt_tokens: int = 64
    answer_tokens: int = 64
    rounds: int = 3
    properties: int = 200
    """The size of a schema that was never seen before."""
    schemas: int = 8

    name = "structured"
    figures = (
        Figure("streams_tokens_per_s", "many streams: tokens out", "tok/s", "higher", times_the_peer(0.95)),
        Figure("keys_tokens_per_s", "one stream, long fixed keys: tokens out", "tok/s", "higher", times_the_peer(1.2)),
        Figure("first_ms", "one short prompt: first token", "ms"),
        Figure("compiling_ms", "of that, added by a schema of its first use", "ms", limit=own(20)),
    )

    @property
    def title(self) -> str:
        return (
            f"structured: {self.streams} streams and one, {self.answer_tokens} tokens out, by a JSON schema and free; "
            f"then {self.schemas} schemas of {self.properties} properties"
        )

    def quick(self) -> Structured:
        return replace(self, streams=4, answer_tokens=16, rounds=1, schemas=1)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        async with AsyncExitStack() as stack:
            llm = await stack.enter_async_context(AsyncLLM(load_config(overrides=setup.engine_settings).config))
            sides = [_Side(llm, True), _Side(llm, False)]
            for side in sides:
                await side.rate(["Hello!"], _records(), replace(GREEDY, max_tokens=8), "warm-up")
                side.rates.clear()
            facts = {"busy_percent_before": await busy_at_rest()}
            for number in range(self.rounds):
                await self._rates(sides, setup, repeat, number)
            setup.view.say(f"{self.name}: {self.schemas} new schemas")
            for number in range(self.schemas):
                await self._first_tokens(sides, setup, repeat, number)
        ours, free = (side.metrics() for side in sides)
        added = [with_ - without for with_, without in zip(sides[0].first_s, sides[1].first_s, strict=True)]
        return [Run(OURS, repeat, ours | {"compiling_ms": median(added) * 1e3}, facts), Run(FREE, repeat, free)]

    async def _rates(self, sides: Sequence[_Side], setup: Setup, repeat: int, number: int) -> None:
        setup.view.say(f"{self.name}: round {number + 1} of {self.rounds}")
        prompts = setup.prompts(f"{self.name} {repeat} {number}")
        texts = [prompts.text(self.prompt_tokens) for _ in range(self.streams)]
        await self._in_turn(sides, number, "streams", texts, _records(), GREEDY)
        questions = tasks(CHAT)
        question = questions[(repeat * self.rounds + number) % len(questions)].text
        await self._in_turn(sides, number, "keys", [await _as_chat(sides[0].llm, question)], _long_keys(), SAMPLED)

    async def _in_turn(
        self, sides: Sequence[_Side], number: int, key: str, prompts: Sequence[Prompt], schema: str, how: SamplingParams
    ) -> None:
        for side in sides if number % 2 == 0 else sides[::-1]:
            await asyncio.sleep(SETTLE_S)
            await side.rate(prompts, schema, replace(how, max_tokens=self.answer_tokens), key)

    async def _first_tokens(self, sides: Sequence[_Side], setup: Setup, repeat: int, number: int) -> None:
        text = setup.prompts(f"{self.name} first {repeat} {number}").text(self.prompt_tokens)
        schema = _wide(self.properties, f"{repeat}_{number}")
        for side in sides if number % 2 == 0 else sides[::-1]:
            await asyncio.sleep(SETTLE_S)
            await side.first(text, schema)


@dataclass(slots=True)
class _Side:
    llm: AsyncLLM
    by_schema: bool
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Tokens a second, from the first token of the last stream on, by figure."""
    first_s: list[float] = field(default_factory=list)
    asked: int = 0

    async def rate(self, prompts: Sequence[Prompt], schema: str, params: SamplingParams, key: str) -> None:
        structure = Structure("json_schema", schema) if self.by_schema else None
        params = replace(params, structured=structure)
        counts: list[int] = []
        firsts: list[float] = []
        await asyncio.gather(*(self._answer(prompt, params, counts, firsts) for prompt in prompts))
        self.rates.setdefault(key, []).append((sum(counts) - len(prompts)) / (perf_counter() - max(firsts)))

    async def first(self, text: str, schema: str) -> None:
        params = replace(GREEDY, max_tokens=2, structured=Structure("json_schema", schema) if self.by_schema else None)
        start = perf_counter()
        firsts: list[float] = []
        await self._answer(text, params, [], firsts)
        self.first_s.append(firsts[0] - start)

    async def _answer(self, prompt: Prompt, params: SamplingParams, counts: list[int], firsts: list[float]) -> None:
        grammar = None if params.structured is None else await self.llm.text.compile(params.structured)
        self.asked += 1
        tenant = Tenant(space=f"{self.by_schema} {self.asked}".encode())
        tokens = 0
        async for delta in self.llm.submit(prompt, params, tenant=tenant, grammar=grammar):
            if not tokens:
                firsts.append(perf_counter())
            tokens += len(delta.token_ids)
        counts.append(tokens)

    def metrics(self) -> Metrics:
        rates = {f"{key}_tokens_per_s": fmean(values) for key, values in self.rates.items()}
        return rates | {"first_ms": median(self.first_s) * 1e3}


async def _as_chat(llm: AsyncLLM, question: str) -> Sequence[int]:
    return await llm.text.encode_chat([{"role": "user", "content": question}], SAMPLED)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _records() -> str:
    """More of them than an answer holds, and mostly text."""
    record = _object({"name": {"type": "string"}, "notes": {"type": "string"}, "count": {"type": "integer"}})
    return json.dumps({"type": "array", "items": record, "minItems": 1000})


def _long_keys() -> str:
    keys = [f"the_{what}_of_the_customer_as_written_in_the_order" for what in ("name", "street", "city", "number")]
    record = _object({key: {"type": "string", "maxLength": 12} for key in keys})
    return json.dumps({"type": "array", "items": record, "minItems": 1000})


def _wide(count: int, name: str) -> str:
    kinds = ({"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["small", "large"]})
    return json.dumps(_object({f"property_{name}_{number}": kinds[number % 4] for number in range(count)}))
