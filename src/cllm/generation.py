"""One submitted prompt, from the caller's side: an async iterator over pieces of text."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cllm.backends.base import PromptScores
from cllm.engine.reading import Embedding
from cllm.engine.request import FinishReason, Output, Request
from cllm.engine.sampling import TokenLogprob
from cllm.errors import RequestCancelledError
from cllm.text.stream import TextStream
from cllm.text.tokenizer import Tokenizer

MOST_TOKENS = 64
"""Tokens in a delta. Some have no text, and text may be held back for long; their log probabilities are not."""


@dataclass(slots=True)
class Delta:
    """A piece of one answer: the text that became certain and the tokens it came from."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Timings:
    """Seconds, as the caller sees them; filled in as the generation goes on."""

    ttft_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


class Canceller(Protocol):
    def __call__(self, request_id: str, index: int | None = None, reason: FinishReason = ...) -> None: ...


@dataclass(slots=True)
class _Answer:
    """What is known of one answer and not passed on yet."""

    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    done: bool = False


class Generation:
    """Iterate for `Delta`s, or `listen` and `drain`. `aclose` (or leaving `async with`) cancels whatever still runs.

    Everything happens on the event loop of the thread that submitted it.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        cancel: Canceller,
        shown: Mapping[int, bytes] | None = None,
    ) -> None:
        """`shown`: special tokens that are part of the text."""
        params = request.params
        self.request = request
        """What the engine works on."""
        self.request_id = request.id
        self.prompt_ids: Sequence[int] = request.prompt
        self.completion_tokens = 0
        self.timings = Timings()
        self.prompt_scores: PromptScores | None = None
        """Of all tokens of the prompt but the first, if asked for; there before the first delta."""
        self.embedding: Embedding | None = None
        self._params = params
        self._cancel = cancel
        self._answers = [_Answer(TextStream(tokenizer, params.stop, shown=shown)) for _ in range(params.n)]
        self._unfinished = params.n
        self._ready: deque[Delta] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_news: Callable[[], None] | None = None
        self._started = time.monotonic()

    # -- the caller --------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._unfinished == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._ready.popleft()

    def listen(self, on_news: Callable[[], None]) -> None:
        """Have `on_news` called whenever there is something to drain, now or later: for who reads many at once."""
        self._on_news = on_news
        if self._ready or self.done:
            on_news()

    def drain(self) -> list[Delta]:
        """What has come since the last time. Once it is `done`, there is no more."""
        deltas = list(self._ready)
        self._ready.clear()
        return deltas

    @property
    def done(self) -> bool:
        return self._unfinished == 0 or self._error is not None

    @property
    def error(self) -> Exception | None:
        """What it ended with, if that is no answer."""
        return self._error

    def stop(self, index: int) -> None:
        """Let one answer end here; nothing more of it comes."""
        answer = self._answers[index]
        if answer.done or self._error is not None:
            return
        answer.done = True
        self._unfinished -= 1
        self._cancel(self.request_id, index if self._unfinished else None, FinishReason.STOP)
        if not self._unfinished:
            self._wake()

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, found in the cache."""
        return self.request.cached_tokens

    @property
    def computed_tokens(self) -> int:
        """Of the prompt, so far, those from the cache included."""
        return self.request.computed

    async def aclose(self) -> None:
        if not self.done:
            self._cancel(self.request_id)
            self.fail(RequestCancelledError(f"request {self.request_id} was cancelled"))
        self._on_news = None  # whoever listened holds this one: without the collector neither would go

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- the engine's outputs, on the event loop ---------------------------------------------------------------

    def take(self, output: Output, now: float) -> None:
        self._note_time(now)
        answer = self._answers[output.answer]
        if answer.done or self._error is not None:
            return
        if output.read is not None:
            if isinstance(output.read, PromptScores):
                self.prompt_scores = output.read
            else:
                self.embedding = output.read
            return
        if output.error is not None or output.reason in (FinishReason.CANCELLED, FinishReason.TIMEOUT):
            self.fail(output.error or RequestCancelledError(f"request {self.request_id} was cancelled"))
            return
        text = self._take_token(answer, output)
        if answer.stream.stopped is not None:
            self._finish(answer, output, text, "stop", answer.stream.stopped)
            if output.reason is None:
                self._cancel(self.request_id, output.answer, FinishReason.STOP)
        elif output.reason is not None:
            self._finish(answer, output, text + answer.stream.flush(), output.reason.value, self._stop_reason(output))
        elif text or len(answer.token_ids) >= MOST_TOKENS:
            self._pass_on(answer, output.answer, text)

    def fail(self, error: Exception) -> None:
        """End with an error, which the next `__anext__` raises."""
        if not self.done:
            self._error = error
            self._wake()

    def _take_token(self, answer: _Answer, output: Output) -> str:
        """Count a token and turn it into text. A token that ends the answer is counted but is not part of it."""
        if output.token_id is None:
            return ""
        self.completion_tokens += 1
        if output.stop_token is not None:
            # Who scores a prompt together with the token behind it counts on that one being there, whatever it is.
            if output.logprob is not None and self._params.prompt_logprobs is not None:
                answer.logprobs.append(output.logprob)
            return ""
        answer.token_ids.append(output.token_id)
        if output.logprob is not None:
            answer.logprobs.append(output.logprob)
        return answer.stream.push(output.token_id)

    def _finish(self, answer: _Answer, output: Output, text: str, reason: str, stop: str | int | None) -> None:
        answer.done = True
        self._unfinished -= 1
        self._pass_on(answer, output.answer, text, reason, stop)

    def _pass_on(
        self, answer: _Answer, index: int, text: str, reason: str | None = None, stop: str | int | None = None
    ) -> None:
        logprobs = answer.logprobs if self._params.logprobs is not None else None
        self._ready.append(Delta(index, text, answer.token_ids, logprobs, reason, stop))
        answer.token_ids, answer.logprobs = [], []
        self._wake()

    def _stop_reason(self, output: Output) -> int | None:
        """The stop token the caller asked for; the model's own end of text needs no naming."""
        return output.stop_token if output.stop_token in self._params.stop_token_ids else None

    def _note_time(self, now: float) -> None:
        elapsed = now - self._started
        timings = self.timings
        if timings.ttft_s == 0.0:
            timings.ttft_s = elapsed
        timings.decode_s = elapsed - timings.ttft_s
        timings.total_s = elapsed

    def _wake(self) -> None:
        if self._on_news is not None:
            self._on_news()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
