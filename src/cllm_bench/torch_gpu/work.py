"""What is measured, on which device, and the engine it is measured on."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cllm import AsyncLLM, SamplingParams
from cllm.config import load_config
from cllm.engine.observer import RequestRecord
from cllm.structured.matcher import Grammar

Measures = dict[str, Any]
Keep = Callable[[str, Measures], None]
"""Called with what was measured as soon as it is known: what comes after may fail."""


@dataclass(frozen=True)
class Sizes:
    """How much work. The defaults are those that figures are stated for."""

    stream_in: int = 128
    stream_out: int = 128
    many: int = 256
    some: int = 64
    prompts: int = 8
    long_prompt: int = 2048
    shared_prompt: int = 2000
    attended: int = 4096
    idle_out: int = 800
    client_processes: int = 4
    repeats: int = 3


TINY = Sizes(
    stream_in=16, stream_out=12, many=8, some=8, prompts=2, long_prompt=64, shared_prompt=80, attended=64, idle_out=24,
    client_processes=2, repeats=1,
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a section works."""

    device: str
    directory: Path
    """Where models lie, and whatever else is written."""
    tiny: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        return TINY if self.tiny else Sizes()

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def shape(self, name: str) -> str:
        return "tiny" if self.tiny else name

    def settings_for(self, shape: str, **more: Any) -> dict[str, Any]:
        """The settings of a server as its user would start it, and `more`."""
        settings: dict[str, Any] = {
            "model.name": str(self.directory / self.shape(shape)),
            "backend.type": "torch",
            "backend.torch.device": self.device,
            "kv.disk.enabled": False,  # what an earlier run left there would not be computed
            "log.level": "warning",
        }
        if not self.on_gpu:
            settings |= {"resources.kv_cache_max_memory_mb": 16, "backend.threads": 1}
        return settings | self.settings | {key.replace("__", "."): value for key, value in more.items()}


class Step(NamedTuple):
    ended: float
    seconds: float
    prompt_tokens: int
    rows: int


class StepLog:
    """Every step that the engine takes."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None:
        self.steps.append(Step(time.perf_counter(), seconds, prompt_tokens, decode_tokens))

    def on_finished(self, record: RequestRecord) -> None: ...

    def on_eviction(self, count: int, seconds: float) -> None: ...

    def decode_rate(self, rows: int) -> tuple[float, int]:
        """Tokens a second of the steps that decode so many rows and nothing else; and how many there were."""
        times = [step.seconds for step in self.steps if step.rows == rows and not step.prompt_tokens]
        return (rows * len(times) / sum(times) if times else 0.0), len(times)


class Answered(NamedTuple):
    seconds: float
    """From the first request to the last token of all."""
    answers: list[list[int]]
    first_s: list[float]
    cached: list[int]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Bench:
    """A running engine, with its steps written down."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.log = StepLog()
        llm.observers.append(self.log)

    async def ask(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], grammar: Grammar | None = None
    ) -> Answered:
        """All at once."""
        self.log.steps.clear()
        started = time.perf_counter()
        generations = [
            self.llm.submit(prompt, each, grammar=grammar) for prompt, each in zip(prompts, params, strict=True)
        ]
        answers = await asyncio.gather(*map(_read, generations))
        seconds = time.perf_counter() - started
        first_s = [generation.timings.ttft_s for generation in generations]
        return Answered(seconds, list(answers), first_s, [generation.cached_tokens for generation in generations])

    async def ask_alike(self, prompts: Sequence[Sequence[int]], tokens: int) -> Answered:
        """Greedy answers of so many tokens."""
        return await self.ask(prompts, [greedy(tokens)] * len(prompts))

    def prompts(self, count: int, length: int, seed: str) -> list[list[int]]:
        return random_prompts(self.llm.text.shape.n_vocab, count, length, seed)


async def _read(generation: Any) -> list[int]:
    tokens: list[int] = []
    async for delta in generation:
        tokens += delta.token_ids
    return tokens


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def random_prompts(vocab: int, count: int, length: int, seed: str) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(vocab) for _ in range(length)] for _ in range(count)]


@asynccontextmanager
async def engine(settings: dict[str, Any]) -> AsyncIterator[Bench]:
    llm = AsyncLLM(load_config(None, settings, environ={}).config)
    bench = Bench(llm)
    async with llm:
        # As the server does it: a full collection that walks all that was loaded takes longer than a step.
        gc.collect()
        gc.freeze()
        yield bench
    gc.unfreeze()
