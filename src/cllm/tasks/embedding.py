"""Embeds many texts, some at a time, so that they fill the engine's steps and leave room in its queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from cllm.engine.reading import Embedding, normalised
from cllm.engine.tenant import ANONYMOUS, Tenant
from cllm.errors import BackendError, OverloadedError
from cllm.generation import Generation

log = logging.getLogger("cllm")

AT_ONCE = 32
"""Texts of one job that the engine has at the same time."""


class Submits(Protocol):
    """What of `AsyncLLM` an `EmbeddingJob` uses."""

    @property
    def submit_embedding(self) -> Callable[..., Generation]: ...


class EmbeddingJob:
    """Texts to embed, given as tokens. Call `compute` once."""

    def __init__(
        self,
        llm: Submits,
        texts: Sequence[Sequence[int]],
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        tenant: Tenant = ANONYMOUS,
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
        """Cancelling it cancels the texts that are being computed."""
        numbers = iter(range(len(self._texts)))
        workers = [asyncio.ensure_future(self._work(numbers)) for _ in range(min(AT_ONCE, len(self._texts)))]
        began = time.monotonic()
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._log(time.monotonic() - began)
        found = [vector for vector in self._found if vector is not None]
        if len(found) < len(self._found):
            raise BackendError(f"the backend gave no embedding for text {self._found.index(None)}")
        return found

    def _log(self, seconds: float) -> None:
        """One line for the job, as for any request; those of single texts are debug messages."""
        if self._request_id is not None:
            done = sum(vector is not None for vector in self._found)
            log.info(
                "%s embedded %d of %d texts: prompts %d (%d cached), %.3f s",
                *(self._request_id, done, len(self._texts), self.prompt_tokens, self.cached_tokens, seconds),
            )

    async def _work(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            while not await self._embed(number):
                self._finished.clear()
                await self._finished.wait()

    async def _embed(self, number: int) -> bool:
        """False if the queue is full; try again when another text of this job is done."""
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
    """Its first dimensions, normalised."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    return normalised(vector[:dimensions].astype(np.float64))
