"""What a model makes of texts beside answers, and many of them to be embedded: some at a time, so that they fill the
engine's steps and leave room in its queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from cllm.backends.base import Backend
from cllm.engine.params import SamplingParams
from cllm.engine.reading import Embedding, PromptPooling, PromptScoring, normalised
from cllm.engine.tenant import NOBODY, Tenant
from cllm.errors import BackendError, InvalidRequestError, OverloadedError
from cllm.generation import Generation
from cllm.text.pairs import Pairs
from cllm.text.tokenizer import Tokenizer

log = logging.getLogger("cllm")

EMBEDDING = SamplingParams(max_tokens=0, context_window=None)
"""How texts are computed of which nothing but the embedding is wanted."""

AT_ONCE = 32
"""Texts of one request that the engine has at the same time."""


@dataclass(frozen=True, slots=True)
class TextReading:
    """What can be read off texts with a loaded model, and why not what cannot."""

    name: str
    backend: Backend
    tokenizer: Tokenizer
    text_end: Sequence[int] = ()
    """Tokens behind a text to embed."""
    pairs: Pairs | None = None
    """A query and a document as tokens, where the model ranks documents."""

    @property
    def no_embeddings(self) -> str | None:
        """Why texts cannot be embedded; None: they can."""
        backend = self.backend
        if backend.pooling is None or backend.no_reading is not None:
            return backend.no_reading or f"{backend.name} makes no embeddings"
        return f"{self.name} ranks documents and makes no embeddings: use /v1/rerank" if backend.ranks else None

    @property
    def no_ranking(self) -> str | None:
        """Why documents cannot be ranked; None: they can."""
        if self.pairs is not None:
            return None
        return f"{self.name} has no head that ranks documents (pooling_type rank): serve a reranker for that"

    def encode_input(self, text: str) -> list[int]:
        """A text to embed: the model may want a token behind it."""
        return [*self.tokenizer.encode(text), *self.text_end] if text else []

    def encode_pair(self, query: str, document: str) -> list[int]:
        """A query and a document, as a model with a head for that reads them."""
        if self.pairs is None:
            raise InvalidRequestError(self.no_ranking or "", "model")
        return self.pairs(query, document)

    def begin(self) -> PromptPooling:
        """An embedding, or a rank."""
        if self.backend.pooling is None:
            raise InvalidRequestError(self.no_embeddings or "", "model")
        return PromptPooling(self.backend.pooling, ranks=self.backend.ranks)

    def begin_answer(self, params: SamplingParams) -> PromptScoring | None:
        """What is read off the prompt of an answer. Raises where the model answers nothing."""
        backend = self.backend
        if backend.no_answers is not None:
            raise InvalidRequestError(backend.no_answers, "model")
        if params.prompt_logprobs is None:
            return None
        if backend.no_reading is not None:
            raise InvalidRequestError(f"prompt_logprobs: {backend.no_reading}", "prompt_logprobs")
        return PromptScoring(params.prompt_logprobs, backend.score_weight)


class Submits(Protocol):
    """A model that takes texts to embed."""

    @property
    def submit_embedding(self) -> Callable[..., Generation]: ...


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
        """One line, as of every request; those of single texts are for debugging."""
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
