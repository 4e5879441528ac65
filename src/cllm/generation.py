"""One submitted prompt, from the caller's side: deltas of text as they come, or whole completions."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cllm.backends.base import PromptScores
from cllm.dialect.deltas import ChatDelta, Delta, ReasoningDelta, ToolCallStart
from cllm.dialect.reader import AnswerReader
from cllm.engine.reading import Embedding
from cllm.engine.request import FinishReason, Output, Request
from cllm.engine.sampling import TokenLogprob
from cllm.errors import InvalidRequestError, RequestCancelledError
from cllm.text.detokenizer import Detokenizer
from cllm.text.tokenizer import Tokenizer

MOST_TOKENS = 64
"""Tokens in a delta. Some have no text, and text may be held back for long; their log probabilities are not."""


@dataclass(slots=True)
class Timings:
    """Seconds since the prompt was submitted, updated with every token."""

    ttft_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """The text of a JSON object."""


@dataclass(slots=True)
class Completion:
    """One whole answer: `add` its deltas as they come. What they do not say, such as `token_ids` and the prompt's cost,
    is filled in by `Generation.collect`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    """Empty until the answer has ended."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    """None if the request did not ask for them."""
    timings: Timings = field(default_factory=Timings)
    prompt_logprobs: PromptScores | None = None
    """For the prompt's tokens from the second one on, with `SamplingParams.prompt_logprobs`."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """All complete if the finish_reason is tool_calls; otherwise the last one is cut off."""
    reasoning: str = ""
    """Left in `text` by `LLM.generate`, and by `LLM.chat` without tools."""
    stop_reason: str | int | None = None
    completion_tokens: int = 0
    """Counts all answers to the prompt."""
    generated: list[int] = field(default_factory=list)
    """All of its tokens, with one that ended it."""

    def add(self, delta: ChatDelta) -> None:
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        self.generated += delta.generated
        if isinstance(delta, Delta):
            if delta.text:
                # A local variable that alone refers to the text grows in place; `self.text +=` copies all of it.
                text, self.text = self.text, ""
                text += delta.text
                self.text = text
            if delta.finish_reason is not None:
                self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        elif isinstance(delta, ReasoningDelta):
            text, self.reasoning = self.reasoning, ""
            text += delta.text
            self.reasoning = text
        elif isinstance(delta, ToolCallStart):
            self.tool_calls.append(ToolCall(delta.id, delta.name, ""))
        else:
            self.tool_calls[delta.number].arguments += delta.text


class Sink(Protocol):
    """Where the outputs of a request go, on the event loop: a `Generation`, or what a caller gave to `queue_for`."""

    @property
    def request(self) -> Request: ...

    @property
    def done(self) -> bool:
        """Whether it needs no more outputs. It gets none after that, but its request goes on unless it is cancelled."""

    def take(self, output: Output, now: float) -> None:
        """An output of the engine, at a time of `time.monotonic()`. Each answer's last one has a `reason`."""

    def fail(self, error: Exception) -> None:
        """The request ended without its last outputs, because the model was closed, or by `AsyncLLM.end`."""


class Canceller(Protocol):
    def __call__(self, request_id: str, index: int | None = None, reason: FinishReason = ...) -> None: ...


@dataclass(slots=True)
class _Pending:
    """Tokens of one answer that are not part of a delta yet."""

    stream: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    """Counts the whole answer, also tokens that are part of a delta."""
    empty: bool = True
    """Whether no token is part of it."""
    done: bool = False


class Generation:
    """Iterate over its deltas, or `collect` them. `aclose` (or leaving `async with`) cancels what still runs.

    Everything happens on the event loop of the thread that submitted it.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, cancel: Canceller) -> None:
        params, shown = request.params, request.submission.shown
        self.request = request
        self.request_id = request.id
        self.prompt_ids: Sequence[int] = request.prompt
        self.completion_tokens = 0
        self.timings = Timings()
        self.prompt_scores: PromptScores | None = None
        """For all tokens of the prompt but the first, if asked for; known before the first delta."""
        self.embedding: Embedding | None = None
        self._params = params
        self._cancel = cancel
        self._answers = [_Pending(Detokenizer(tokenizer, params.stop, shown=shown)) for _ in range(params.n)]
        if request.resumed:
            self._resume()
        self._unfinished = sum(not answer.done for answer in self._answers)
        self._deltas: deque[Delta] = deque()
        self._first_index = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._notify: Callable[[Generation], None] | None = None
        self._started = time.monotonic()

    def _resume(self) -> None:
        """The text goes on after that of the tokens that were generated elsewhere."""
        for sequence, answer in zip(self.request.sequences, self._answers, strict=True):
            answer.done = sequence.ended
            answer.empty = not sequence.n_given
            for token in sequence.given:
                answer.stream.push(token)
            if answer.stream.stopped is not None:
                raise InvalidRequestError(
                    f"generated[{sequence.index}] has the stop string {answer.stream.stopped!r}; pass None for an "
                    "answer that has ended",
                    "generated",
                )

    # -- the caller --------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._unfinished == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._deltas.popleft()

    async def collect(
        self, reader: AnswerReader | None = None, on_delta: Callable[[ChatDelta], object] | None = None
    ) -> list[Completion]:
        """Wait for the end of all answers. `reader` finds reasoning and tool calls in the text of the only answer;
        `on_delta` is called with every delta as it comes."""
        with_logprobs = self._params.logprobs is not None
        completions = [Completion(logprobs=[] if with_logprobs else None) for _ in range(self._params.n)]
        async with self:
            async for delta in self:
                completions[delta.index].token_ids += delta.token_ids
                for each in (delta,) if reader is None else reader.read(delta):
                    completions[each.index].add(each)
                    if on_delta is not None:
                        on_delta(each)
                if reader is not None and reader.ended and delta.finish_reason is None:
                    self.stop(delta.index, reader.tokens)
                    break
        for completion in completions:
            completion.prompt_tokens, completion.cached_tokens = len(self.prompt_ids), self.cached_tokens
            completion.completion_tokens, completion.timings = self.completion_tokens, self.timings
            completion.prompt_logprobs = self.prompt_scores
        return completions

    def forward(self, queue: deque[Delta], notify: Callable[[Generation], None], first_index: int = 0) -> None:
        """From now on put deltas into `queue`, numbered from `first_index`, and call `notify` after each and at the
        end. For readers of many generations."""
        for delta in self._deltas:
            delta.index += first_index
            queue.append(delta)
        has_news = bool(self._deltas) or self.done
        self._deltas, self._first_index, self._notify = queue, first_index, notify
        if has_news:
            notify(self)

    @property
    def done(self) -> bool:
        return self._unfinished == 0 or self._error is not None

    @property
    def error(self) -> Exception | None:
        """Why it failed, if it did."""
        return self._error

    def stop(self, index: int, tokens: int) -> None:
        """End one answer after so many tokens. Those that came after them do not count, and no more deltas come."""
        answer = self._answers[index]
        self.completion_tokens -= answer.tokens - tokens
        answer.tokens = tokens
        if answer.done or self._error is not None:
            return
        answer.done = True
        self._unfinished -= 1
        self._cancel(self.request_id, index if self._unfinished else None, FinishReason.STOP)
        if not self._unfinished:
            self._wake()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache."""
        return self.request.hit.tokens

    @property
    def known_tokens(self) -> int:
        """Prompt tokens found in the cache, whether all layers could go on behind them or not."""
        return self.request.hit.known

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that are computed so far, cached ones included."""
        return self.request.computed

    async def aclose(self) -> None:
        if not self.done:
            self._cancel(self.request_id)
            self.fail(RequestCancelledError(f"request {self.request_id} was cancelled"))
        self._notify = None  # it refers back to here: the garbage collector would have to break the cycle

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
            asked = output.stop_token in self._params.stop_token_ids  # or the model's own end of text
            stop = output.stop_token if asked else None
            self._finish(answer, output, text + answer.stream.flush(), output.reason.value, stop)
        elif text or len(answer.token_ids) >= MOST_TOKENS:
            self._pass_on(answer, output.answer, text)

    def fail(self, error: Exception) -> None:
        """End with an error, which the next `__anext__` raises."""
        if not self.done:
            self._error = error
            self._wake()

    def _take_token(self, answer: _Pending, output: Output) -> str:
        """Count a token and turn it into text. A token that ends the answer is counted but is not part of it."""
        if output.token_id is None:
            return ""
        self.completion_tokens += 1
        answer.tokens += 1
        if output.stop_token is not None:
            # An answer of nothing else has this one. So have prompts that are scored: clients that score a prompt
            # together with the token after it rely on that one being there, whatever it is.
            if output.logprob is not None and (answer.empty or self._params.prompt_logprobs is not None):
                answer.logprobs.append(output.logprob)
            return ""
        answer.empty = False
        answer.token_ids.append(output.token_id)
        if output.logprob is not None:
            answer.logprobs.append(output.logprob)
        return answer.stream.push(output.token_id)

    def _finish(self, answer: _Pending, output: Output, text: str, reason: str, stop: str | int | None) -> None:
        answer.done = True
        self._unfinished -= 1
        self._pass_on(answer, output.answer, text, reason, stop, output.stop_token)

    def _pass_on(
        self,
        answer: _Pending,
        index: int,
        text: str,
        reason: str | None = None,
        stop: str | int | None = None,
        end_token: int | None = None,
    ) -> None:
        ids = answer.token_ids
        logprobs = answer.logprobs if self._params.logprobs is not None else None
        generated = ids if end_token is None else [*ids, end_token]
        self._deltas.append(Delta(self._first_index + index, text, ids, logprobs, reason, stop, generated))
        answer.token_ids, answer.logprobs = [], []
        self._wake()

    def _note_time(self, now: float) -> None:
        elapsed = now - self._started
        timings = self.timings
        if timings.ttft_s == 0.0:
            timings.ttft_s = elapsed
        timings.decode_s = elapsed - timings.ttft_s
        timings.total_s = elapsed

    def _wake(self) -> None:
        if self._notify is not None:
            self._notify(self)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
