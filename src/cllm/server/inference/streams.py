"""Submitted prompts as streams of deltas, in batches; leaving a stream cancels what still runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from cllm.dialect.deltas import ChatDelta, Delta
from cllm.server.http.response import CacheDetails, Turns
from cllm.server.state import session_of, tenant_of, time_left

if TYPE_CHECKING:
    from fastapi import Request

    from cllm.dialect.reader import AnswerReader
    from cllm.engine.submission import Submission
    from cllm.generation import Generation
    from cllm.llm import AsyncLLM
    from cllm.server.http.response import DeltaSource
    from cllm.server.state import ModelState

BATCH = 64
"""Most deltas in a batch: rendering one must not take long."""
_BATCH_LOGPROBS = 2048
"""Most log probabilities in a batch; a delta holds at most those of `generation.MOST_TOKENS`."""
_TURN_S = 0.004
"""How long submitting may take before others get their turn."""


class Head(NamedTuple):
    """What every event and answer to one request begins with."""

    id: str
    created: int
    model: str

    def start(self, kind: str) -> str:
        """The beginning of an object of this kind, up to its choices."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return json.dumps(head, separators=(",", ":"))[:-1] + ',"choices":['


def sent_by(
    request: Request,
    model: ModelState,
    submissions: Sequence[Submission],
    name: str,
    *,
    priority: int | None = None,
    timeout: float | None = None,
) -> list[Submission]:
    """Submissions with what an HTTP request says of all its prompts: whose they are, and how long they may take."""
    numbered = len(submissions) != 1 or submissions[0].embeds
    return [
        replace(
            submission,
            request_id=f"{name}-{number}" if numbered else name,
            priority=priority or 0,
            timeout_s=time_left(request, model, timeout),
            tenant=tenant_of(request),
            session=session_of(request),
        )
        for number, submission in enumerate(submissions)
    ]


class CompletionStream:
    """The answers to one or more prompts: `async with` submits and cleans up, `async for` yields batches of deltas.

    A batch holds the deltas that have arrived since the last one, so a slow reader gets larger batches instead of more
    of them, but no more than `batch`, and the event loop has its turn between two of them. Answers are numbered
    through: prompt 0's `n` first, then prompt 1's.
    """

    def __init__(
        self, llm: AsyncLLM, submissions: Sequence[Submission], batch: int = BATCH, *, cache_details: bool = False
    ) -> None:
        """`submissions`: at least one, with the same parameters."""
        params = submissions[0].params
        self.generations: list[Generation] = []
        self._llm = llm
        self._submissions = submissions
        self._cache_details = cache_details
        self._n = params.n
        self._deltas: deque[Delta] = deque()
        """Deltas of all generations, in the order in which they came."""
        per_token = 1 + (params.logprobs or 0)
        self._batch = min(batch, max(1, _BATCH_LOGPROBS // per_token)) if params.logprobs is not None else batch
        self._turns = Turns()
        self._failure: Exception | None = None
        self._running = 0
        """Generations that have not ended."""
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> CompletionStream:
        try:
            turn = time.perf_counter()
            for submission in self._submissions:
                self.generations.append(self._llm.queue(submission))
                if time.perf_counter() - turn > _TURN_S:
                    await self._turns.give()
                    turn = time.perf_counter()
            await self._llm.confirm(self.generations)
        except BaseException:
            await self._close()
            raise
        self._running = len(self.generations)
        for number, generation in enumerate(self.generations):
            generation.forward(self._deltas, self._on_delta, number * self._n)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    def __aiter__(self) -> CompletionStream:
        return self

    async def __anext__(self) -> list[Delta]:
        deltas = self._deltas
        if deltas:  # more than a batch came
            await self._turns.give()
        while not deltas:
            if self._failure is not None:
                raise self._failure
            if not self._running:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if len(deltas) > self._batch:
            return [deltas.popleft() for _ in range(self._batch)]
        batch = list(deltas)
        deltas.clear()
        return batch

    def stop(self, index: int, tokens: int) -> None:
        """End one answer after so many tokens; later ones do not count."""
        number, answer = divmod(index, self._n)
        self.generations[number].stop(answer, tokens)

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        return [submission.prompt for submission in self._submissions]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(submission.prompt) for submission in self._submissions)

    @property
    def cached_tokens(self) -> int:
        return sum(generation.cached_tokens for generation in self.generations)

    @property
    def computed_tokens(self) -> int:
        return sum(generation.computed_tokens for generation in self.generations)

    @property
    def cache_details(self) -> CacheDetails | None:
        if not self._cache_details:
            return None
        known = sum(generation.known_tokens for generation in self.generations)
        return CacheDetails(known, self.prompt_tokens - self.cached_tokens)

    @property
    def completion_tokens(self) -> int:
        return sum(generation.completion_tokens for generation in self.generations)

    @property
    def marked_tokens(self) -> int:
        """Prompt tokens that `cache_control` asks to keep cached."""
        return max((mark.tokens for submission in self._submissions for mark in submission.pins), default=0)

    def _on_delta(self, generation: Generation) -> None:
        if generation.done:
            self._running -= 1
            self._failure = self._failure or generation.error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _close(self) -> None:
        for generation in self.generations:
            await generation.aclose()


class ChatStream:
    """The answers to one conversation: `async with` submits and cleans up, `async for` yields batches of deltas.

    The last delta of an answer has its finish_reason and no text.
    """

    def __init__(
        self, head: Head, model: ModelState, completions: CompletionStream, readers: Sequence[AnswerReader] = ()
    ) -> None:
        """`readers`: one per answer, or none if answers are nothing but text."""
        self.head = head
        self.model = model
        self._completions = completions
        self._readers = readers

    async def __aenter__(self) -> ChatStream:
        await self._completions.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._completions.__aexit__()

    def __aiter__(self) -> ChatStream:
        return self

    async def __anext__(self) -> list[ChatDelta]:
        deltas: list[ChatDelta] = []
        while not deltas:
            for delta in await self._completions.__anext__():
                if self._readers:
                    deltas += self._read(delta)
                elif delta.finish_reason is None:
                    deltas.append(delta)
                else:
                    rest = delta.generated
                    if delta.text or delta.logprobs:
                        ids, rest = delta.token_ids, rest[len(delta.token_ids) :]
                        deltas.append(Delta(delta.index, delta.text, ids, delta.logprobs, generated=ids))
                    deltas.append(Delta(delta.index, "", (), None, delta.finish_reason, delta.stop_reason, rest))
        return deltas

    def _read(self, delta: Delta) -> list[ChatDelta]:
        reader = self._readers[delta.index]
        deltas = reader.read(delta)
        if deltas and reader.ended and delta.finish_reason is None:
            self._completions.stop(delta.index, reader.tokens)
        return deltas

    @property
    def prompt(self) -> Sequence[int]:
        """The conversation as tokens."""
        return self._completions.prompts[0]

    @property
    def prompt_tokens(self) -> int:
        return self._completions.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self._completions.cached_tokens

    @property
    def computed_tokens(self) -> int:
        return self._completions.computed_tokens

    @property
    def cache_details(self) -> CacheDetails | None:
        return self._completions.cache_details

    @property
    def completion_tokens(self) -> int:
        return self._completions.completion_tokens

    @property
    def marked_tokens(self) -> int:
        return self._completions.marked_tokens

    @property
    def generations(self) -> Sequence[Generation]:
        return self._completions.generations

    @property
    def reasoning_tokens(self) -> int:
        return sum(reader.reasoning_tokens for reader in self._readers)


class DeltaSink(Protocol):
    """A whole answer in the making."""

    def add(self, delta: Any, /) -> object: ...


C = TypeVar("C", bound=DeltaSink)


async def collect(stream: DeltaSource[Any], answers: Sequence[C]) -> Sequence[C]:
    """Submit, add every delta to its answer, and clean up."""
    async with stream:
        async for batch in stream:
            for delta in batch:
                answers[delta.index].add(delta)
    return answers
