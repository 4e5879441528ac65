"""The engine in this process on a model of random weights, with its steps written down, and what it is asked."""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cllm import AsyncLLM, SamplingParams
from cllm.config import load_config
from cllm.engine.observer import RequestRecord
from cllm_bench.torch_gpu.models import use_random_weights, write_directory
from cllm_bench.workloads.base import Setup


@dataclass(frozen=True)
class Place:
    """Where the models lie, and on which device they run."""

    directory: Path
    device: str
    tiny: bool
    settings: dict[str, Any]

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


@contextmanager
def random_models(setup: Setup, *shapes: str, tiny: bool) -> Iterator[Place]:
    """Directories of models whose weights this process makes up while it loads them."""
    device = str(setup.settings.get("backend.torch.device", "cuda" if torch.cuda.is_available() else "cpu"))
    with tempfile.TemporaryDirectory(prefix="cllm-torch-") as directory, use_random_weights(device):
        place = Place(Path(directory), device, tiny, dict(setup.settings))
        for name in dict.fromkeys(map(place.shape, shapes)):
            write_directory(place.directory / name, name)
        yield place


class Step(NamedTuple):
    seconds: float
    prompt_tokens: int
    rows: int


class StepLog:
    """Every step that the engine takes."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None:
        self.steps.append(Step(seconds, prompt_tokens, decode_tokens))

    def on_finished(self, record: RequestRecord) -> None: ...

    def on_eviction(self, count: int, seconds: float) -> None: ...

    def decode_rate(self, rows: int) -> float:
        """Tokens a second of the steps that decode so many rows and nothing else."""
        times = [step.seconds for step in self.steps if step.rows == rows and not step.prompt_tokens]
        return rows * len(times) / sum(times) if times else 0.0


class Answered(NamedTuple):
    seconds: float
    """From the first request to the last token of all."""
    answers: list[list[int]]
    first_s: list[float]
    cached: list[int]

    @property
    def rate(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


class Bench:
    """A running engine, with its steps written down."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.log = StepLog()
        llm.observers.append(self.log)

    async def ask(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Answered:
        """All at once."""
        self.log.steps.clear()
        started = time.perf_counter()
        generations = [self.llm.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        answers = await asyncio.gather(*map(_read, generations))
        seconds = time.perf_counter() - started
        first_s = [generation.timings.ttft_s for generation in generations]
        return Answered(seconds, list(answers), first_s, [generation.cached_tokens for generation in generations])

    async def ask_alike(self, prompts: Sequence[Sequence[int]], tokens: int) -> Answered:
        """Greedy answers of so many tokens."""
        return await self.ask(prompts, [greedy(tokens)] * len(prompts))

    def prompts(self, count: int, length: int, seed: str) -> list[list[int]]:
        source, vocabulary = random.Random(seed), self.llm.text.spec.n_vocab
        return [[source.randrange(vocabulary) for _ in range(length)] for _ in range(count)]

    async def speeds(self, many: int, tokens_in: int, tokens_out: int) -> dict[str, float]:
        """One stream, then many at once: generated tokens over all the time from the first request to the last token.
        Steps in which all of the many decode are also counted by themselves."""
        for count in (1, many):  # warm up
            await self.ask_alike(self.prompts(count, tokens_in, f"warm {count}"), tokens_out)
        one = await self.ask_alike(self.prompts(1, tokens_in, "one"), tokens_out)
        all_at_once = await self.ask_alike(self.prompts(many, tokens_in, "many"), tokens_out)
        return {
            "one_tokens_per_s": one.rate,
            "many_tokens_per_s": all_at_once.rate,
            "decode_tokens_per_s": self.log.decode_rate(many),
        }


async def _read(generation: Any) -> list[int]:
    tokens: list[int] = []
    async for delta in generation:
        tokens += delta.token_ids
    return tokens


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


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
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the next engine counts what is free
