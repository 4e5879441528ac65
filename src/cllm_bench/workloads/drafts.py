"""Draft tokens on and off: are repetitive answers faster, and the others no slower?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from statistics import fmean
from time import perf_counter

from cllm.config import load_config
from cllm.engine.params import SamplingParams
from cllm.engine.tenant import Tenant
from cllm.llm import AsyncLLM
from cllm_bench.drafts.texts import CHAT, EDIT, FORM, KINDS, QUOTE, Task, tasks
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, Metrics, Run, times_the_peer
from cllm_bench.workloads.base import SETTLE_S, LocalWorkload, Setup, busy_at_rest

NO_DRAFTS = "drafts off"
GREEDY, SAMPLED = "greedy", "sampled"
AGAIN = "again"
PARAMS = {
    GREEDY: SamplingParams(temperature=0.0),
    SAMPLED: SamplingParams(temperature=0.7, top_p=0.95, seed=7),
}

_LABELS = {EDIT: "edit code", QUOTE: "quote a text", FORM: "fill a form", CHAT: "free chat"}
_MUST = {(EDIT, GREEDY): 1.8, (QUOTE, GREEDY): 1.8, (CHAT, GREEDY): 1.0, (CHAT, SAMPLED): 1.0}


def _figures() -> tuple[Figure, ...]:
    times = [
        Figure(
            f"{kind}_{mode}_ms",
            f"{_LABELS[kind]}, {mode}: a token",
            "ms",
            limit=times_the_peer(_MUST[kind, mode]) if (kind, mode) in _MUST else None,
        )
        for mode in PARAMS
        for kind in KINDS
    ]
    shares = [
        Figure(f"{kind}_{mode}_accepted", f"{_LABELS[kind]}, {mode}: drafted tokens that came true", "%", "higher")
        for mode in PARAMS
        for kind in KINDS
    ]
    return (
        *times,
        Figure(f"{AGAIN}_ms", "the same chat once more, greedy: a token", "ms"),
        Figure("streams_tokens_per_s", "many streams: tokens out", "tok/s", "higher", times_the_peer(0.99)),
        *shares,
        Figure(f"{AGAIN}_accepted", "the same chat once more, greedy: drafted tokens that came true", "%", "higher"),
    )


@dataclass(frozen=True)
class Drafts(LocalWorkload):
    """Two engines in this process, with drafts and without, get the same requests in turn. Every request is a
    stranger's, in a space of its own, so that none profits from the one before; only `again` asks a second time.
    """

    texts: int = 3
    """Texts of each kind."""
    answer_tokens: int = 192
    streams: int = 32
    stream_prompt_tokens: int = 64
    stream_answer_tokens: int = 64
    stream_rounds: int = 3

    name = "drafts"
    figures = _figures()

    @property
    def title(self) -> str:
        return (
            f"drafts: {self.texts} texts of each kind, {self.answer_tokens} tokens out, one stream; "
            f"then {self.streams} streams; with drafts and without in turn"
        )

    def quick(self) -> Drafts:
        return replace(self, texts=1, answer_tokens=32, streams=4, stream_answer_tokens=16, stream_rounds=1)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        async with AsyncExitStack() as stack:
            sides = [await self._start(setup, stack, enabled) for enabled in (True, False)]
            facts = {"busy_percent_before": await busy_at_rest()}
            for kind in KINDS:
                for mode in PARAMS:
                    setup.view.say(f"{self.name}: {_LABELS[kind]}, {mode}")
                    await self._one_stream(sides, kind, mode, repeat)
            setup.view.say(f"{self.name}: {self.streams} streams")
            await self._many_streams(sides, setup, repeat)
        ours, theirs = (side.metrics() for side in sides)
        return [Run(OURS, repeat, ours, facts), Run(NO_DRAFTS, repeat, theirs)]

    async def _start(self, setup: Setup, stack: AsyncExitStack, enabled: bool) -> _Side:
        settings = {**setup.engine_settings, "drafts.enabled": enabled}
        llm = await stack.enter_async_context(AsyncLLM(load_config(overrides=settings).config))
        side = _Side(llm)
        await side.answer("", Task(CHAT, "Hello!", True), replace(PARAMS[GREEDY], max_tokens=8), "warm-up")
        side.token_s.clear()
        side.drafts.clear()
        return side

    async def _one_stream(self, sides: Sequence[_Side], kind: str, mode: str, repeat: int) -> None:
        params = replace(PARAMS[mode], max_tokens=self.answer_tokens)
        for number, task in enumerate(tasks(kind)[: self.texts]):
            place = f"{kind} {mode} {number} {repeat}"
            await self._in_turn(sides, number, f"{kind}_{mode}", task, params, place)
            if (kind, mode) == (CHAT, GREEDY):
                await self._in_turn(sides, number, AGAIN, task, params, place)

    async def _in_turn(
        self, sides: Sequence[_Side], number: int, key: str, task: Task, params: SamplingParams, place: str
    ) -> None:
        answers = []
        for side in sides if number % 2 == 0 else sides[::-1]:
            await asyncio.sleep(SETTLE_S / 3)
            answers.append(await side.answer(key, task, params, place))
        if answers[0] != answers[1] and sides[0].exact:
            raise BenchError(f"{key}: the answers with drafts and without are not the same")

    async def _many_streams(self, sides: Sequence[_Side], setup: Setup, repeat: int) -> None:
        params = replace(PARAMS[GREEDY], max_tokens=self.stream_answer_tokens, ignore_eos=True)
        for number in range(self.stream_rounds):
            prompts = setup.prompts(f"{self.name} {repeat} {number}")
            texts = [prompts.text(self.stream_prompt_tokens) for _ in range(self.streams)]
            for side in sides if number % 2 == 0 else sides[::-1]:
                await asyncio.sleep(SETTLE_S / 3)
                await side.answer_all(texts, params)


@dataclass(slots=True)
class _Side:
    llm: AsyncLLM
    token_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of a token, for each answer, by figure."""
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """Drafted tokens and those that came true, by figure."""
    rates: list[float] = field(default_factory=list)
    """Tokens a second of many streams, by round."""

    @property
    def exact(self) -> bool:
        """Whether a row's result does not depend on what is computed beside it."""
        return self.llm.text.facts.traits.name != "llama_cpp"

    async def answer(self, key: str, task: Task, params: SamplingParams, place: str) -> list[int]:
        """An answer's tokens, with the time that they took from the first one on."""
        prompt = [{"role": "user", "content": task.text}]
        ids = (
            await self.llm.text.encode_chat(prompt, params)
            if task.is_chat
            else self.llm.text.tokenizer.encode(task.text)
        )
        before = self.llm.executor.snapshot()
        tokens: list[int] = []
        first_at, first = 0.0, 0
        async for delta in self.llm.submit(ids, params, tenant=Tenant(space=place.encode())):
            tokens += delta.token_ids
            if not first:
                first_at, first = perf_counter(), len(tokens)
        seconds = perf_counter() - first_at
        if len(tokens) > first:
            self.token_s.setdefault(key, []).append(seconds / (len(tokens) - first))
        after = self.llm.executor.snapshot()
        counts = self.drafts.setdefault(key, [0, 0])
        counts[0] += after.drafted_tokens - before.drafted_tokens
        counts[1] += after.accepted_drafts - before.accepted_drafts
        return tokens

    async def answer_all(self, texts: Sequence[str], params: SamplingParams) -> None:
        start = perf_counter()
        counts = await asyncio.gather(*(self._count(text, params) for text in texts))
        self.rates.append(sum(counts) / (perf_counter() - start))

    async def _count(self, text: str, params: SamplingParams) -> int:
        generation = self.llm.submit(text, params)
        return sum([len(delta.token_ids) async for delta in generation])

    def metrics(self) -> Metrics:
        times = {f"{key}_ms": fmean(values) * 1e3 for key, values in self.token_s.items()}
        accepted = {f"{key}_accepted": 100 * true / drafted for key, (drafted, true) in self.drafts.items() if drafted}
        return times | accepted | {"streams_tokens_per_s": fmean(self.rates)}
