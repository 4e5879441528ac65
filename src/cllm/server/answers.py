"""From submitted requests to batches of deltas, with nothing left behind whoever leaves first."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from starlette.types import Receive

from cllm.engine.tenant import NOBODY, Tenant
from cllm.server.errors import ClientGoneError

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams
    from cllm.engine.sampling import TokenLogprob
    from cllm.generation import Delta, Generation
    from cllm.kv.pins import PinMark
    from cllm.llm import AsyncLLM
    from cllm.structured.matcher import Grammar

T = TypeVar("T")

BATCH = 64
"""Most deltas in a batch: what is made of it in one go must not take long."""
_BATCH_LOGPROBS = 2048
"""Most log probabilities in a batch; a delta holds at most those of `Generation.MOST_TOKENS`."""
_TURN_S = 0.004
"""How long submitting may take before others get their turn."""


class Head(NamedTuple):
    """What every event and answer to one request begins with."""

    id: str
    created: int
    model: str

    def start(self, kind: str) -> str:
        """The beginning of an object of this kind, up to where its choices begin."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return json.dumps(head, separators=(",", ":"))[:-1] + ',"choices":['


class Counts(Protocol):
    """What a request has cost so far."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int:
        """Of the prompt, so far, those from the cache included."""

    @property
    def completion_tokens(self) -> int: ...


@dataclass(slots=True)
class Answer:
    """One whole answer, put together from its deltas."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, delta: Delta) -> None:
        self.pieces.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Answers:
    """The answers to one or more prompts: `async with` submits and cleans up, `async for` yields batches.

    A batch holds the deltas that have arrived since the last one, so a slow reader gets larger batches instead of more
    of them, but no more than `batch`, and the event loop has its turn between two of them. Answers are numbered
    through: prompt 0's `n` first, then prompt 1's.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int | None = None,
        timeout_s: float | None = None,
        batch: int = BATCH,
        tenant: Tenant = NOBODY,
        pins: Sequence[Sequence[PinMark]] = (),
        grammar: Grammar | None = None,
        shown: Mapping[int, bytes] | None = None,
    ) -> None:
        """`pins` are those of each prompt, or none. `grammar` is what `llm.compile` made of `params.structured`.
        `shown` are special tokens that are part of the text."""
        self.request_id = request_id
        self._tenant = tenant
        self._pins = pins
        self._grammar = grammar
        self._shown = shown
        self.generations: list[Generation] = []
        self._llm = llm
        self.prompts = prompts
        self._params = params
        self._priority = priority or 0
        self._timeout_s = timeout_s
        self._with_news: dict[int, None] = {}
        """Numbers of generations that have something to drain, in the order in which that came."""
        self._arrived: deque[Delta] = deque()
        per_token = 1 + (params.logprobs or 0)
        self._batch = min(batch, max(1, _BATCH_LOGPROBS // per_token)) if params.logprobs is not None else batch
        self._failure: Exception | None = None
        self._open = 0
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Answers:
        try:
            turn = time.perf_counter()
            for number, prompt in enumerate(self.prompts):
                self.generations.append(self._submit(number, prompt))
                if time.perf_counter() - turn > _TURN_S:
                    await asyncio.sleep(0)
                    turn = time.perf_counter()
        except BaseException:
            await self._close()
            raise
        self._open = len(self.generations)
        for number, generation in enumerate(self.generations):
            generation.listen(partial(self._on_news, number))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> list[Delta]:
        if self._arrived:
            await asyncio.sleep(0)
        while True:
            self._take_news()
            if self._arrived:
                return [self._arrived.popleft() for _ in range(min(self._batch, len(self._arrived)))]
            if self._failure is not None:
                raise self._failure
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def collect(self) -> list[Answer]:
        """Wait for the end of all answers."""
        answers = [Answer() for _ in range(len(self.prompts) * self._params.n)]
        async for batch in self:
            for delta in batch:
                answers[delta.index].add(delta)
        return answers

    def stop(self, index: int) -> None:
        """Let one answer end here; nothing more of it comes."""
        number, answer = divmod(index, self._params.n)
        self.generations[number].stop(answer)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def cached_tokens(self) -> int:
        return sum(generation.cached_tokens for generation in self.generations)

    @property
    def computed_tokens(self) -> int:
        return sum(generation.computed_tokens for generation in self.generations)

    @property
    def completion_tokens(self) -> int:
        return sum(generation.completion_tokens for generation in self.generations)

    @property
    def marked_tokens(self) -> int:
        """How much of a prompt is asked to stay cached."""
        return max((mark.tokens for marks in self._pins for mark in marks), default=0)

    def _submit(self, number: int, prompt: Sequence[int]) -> Generation:
        alone = len(self.prompts) == 1
        return self._llm.submit(
            prompt,
            self._params,
            request_id=self.request_id if alone else f"{self.request_id}-{number}",
            priority=self._priority,
            timeout_s=self._timeout_s,
            tenant=self._tenant,
            pins=self._pins[number] if self._pins else (),
            grammar=self._grammar,
            shown=self._shown,
        )

    def _on_news(self, number: int) -> None:
        self._with_news[number] = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take_news(self) -> None:
        numbers, self._with_news = self._with_news, {}
        for number in numbers:
            generation, first_index = self.generations[number], number * self._params.n
            for delta in generation.drain():
                delta.index += first_index
                self._arrived.append(delta)
            if generation.done:
                self._open -= 1
                self._failure = self._failure or generation.error

    async def _close(self) -> None:
        for generation in self.generations:
            await generation.aclose()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled the moment the client closes the connection."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
