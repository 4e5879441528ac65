"""Many texts to be embedded, some at a time: so that they fill the engine's steps, and leave room in its queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from cllm.engine.params import SamplingParams
from cllm.engine.reading import Embedding, normalised
from cllm.engine.tenant import NOBODY, Tenant
from cllm.errors import OverloadedError
from cllm.generation import Generation

EMBEDDING = SamplingParams(max_tokens=0, context_window=None)
"""How texts are computed of which nothing but the embedding is wanted."""

AT_ONCE = 32
"""Texts of one request that the engine has at the same time."""


class Submits(Protocol):
    """A model that takes texts to embed."""

    def submit_embedding(
        self,
        text: str | Sequence[int],
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        tenant: Tenant = NOBODY,
    ) -> Generation: ...


class Embeddings:
    """The embeddings of texts, given as tokens; `compute` once."""

    def __init__(
        self,
        llm: Submits,
        texts: Sequence[Sequence[int]],
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        tenant: Tenant = NOBODY,
    ) -> None:
        self.prompt_tokens = sum(map(len, texts))
        self.cached_tokens = 0
        self._texts = texts
        self._request_id = request_id
        self._submit = partial(llm.submit_embedding, priority=priority, timeout_s=timeout_s, tenant=tenant)
        self._found: list[Embedding | None] = [None] * len(texts)
        self._finished = asyncio.Event()
        self._under_way = 0

    async def compute(self) -> list[Embedding]:
        """Whoever leaves ends those that are under way."""
        numbers = iter(range(len(self._texts)))
        workers = [asyncio.ensure_future(self._work(numbers)) for _ in range(min(AT_ONCE, len(self._texts)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [vector for vector in self._found if vector is not None]

    async def _work(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            while not await self._embed(number):
                self._finished.clear()
                await self._finished.wait()

    async def _embed(self, number: int) -> bool:
        """False: the queue is full, and once another one of these is done there is room again."""
        name = None if self._request_id is None else f"{self._request_id}-{number}"
        try:
            generation = self._submit(self._texts[number], request_id=name)
        except OverloadedError:
            if not self._under_way:
                raise
            return False
        self._under_way += 1
        try:
            async with generation:
                async for _ in generation:
                    pass
        finally:
            self._under_way -= 1
            self._finished.set()
        self._found[number] = generation.embedding
        self.cached_tokens += generation.cached_tokens
        return True


def shortened(vector: Embedding, dimensions: int | None) -> Embedding:
    """Its first dimensions, with length 1."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    return normalised(vector[:dimensions].astype(np.float64))
