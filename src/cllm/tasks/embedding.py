"""Embeds many texts, some at a time, so that they fill the engine's steps and leave room in its queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cllm.engine.reading import Embedding, normalised
from cllm.engine.submission import Submission
from cllm.errors import BackendError, OverloadedError

if TYPE_CHECKING:
    from cllm.llm import AsyncLLM

log = logging.getLogger("cllm")

AT_ONCE = 32
"""Texts of one job that the engine has at the same time."""


class EmbeddingJob:
    """Call `compute` once."""

    def __init__(self, llm: AsyncLLM, texts: Sequence[Submission], name: str | None = None) -> None:
        """`name`: for the log."""
        self.prompt_tokens = sum(len(text.prompt) for text in texts)
        self.cached_tokens = 0
        self._llm = llm
        self._texts = texts
        self._name = name
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
        if self._name is not None:
            done = sum(vector is not None for vector in self._found)
            log.info(
                "%s embedded %d of %d texts: prompts %d (%d cached), %.3f s",
                *(self._name, done, len(self._texts), self.prompt_tokens, self.cached_tokens, seconds),
            )

    async def _work(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            while not await self._embed(number):
                self._finished.clear()
                await self._finished.wait()

    async def _embed(self, number: int) -> bool:
        """False if the queue is full; try again when another text of this job is done."""
        try:
            generation = self._llm.queue(self._texts[number])
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
