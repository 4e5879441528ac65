"""A light streaming client: asks an OpenAI-compatible server and writes down when text arrived."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from types import TracebackType
from typing import Any

from cllm_bench.errors import BenchError
from cllm_bench.http import Address, EventReader, HttpError
from cllm_bench.response import TimedResponse

Message = Mapping[str, str]
OnText = Callable[[int], None]
"""Called at each arrival of text with the number of arrivals so far."""


class ServerGoneError(BenchError):
    """The server does not answer any more."""


class _LeftError(Exception):
    """The client has read as much as it wanted to."""


class Client:
    """Speaks to one server. Every request is greedy and runs to its full length, so that all do the same work.

    `answers` holds all of them in the order they were asked for, also those that failed or still run: what was measured
    before a server died is not lost.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.address = Address(url, {"authorization": f"Bearer {api_key}"} if api_key else None)
        self.answers: list[TimedResponse] = []
        self.model = ""

    async def __aenter__(self) -> Client:
        try:
            status, body = await self.address.fetch("/v1/models")
            if status != 200:
                raise ValueError(f"/v1/models answered {status}")
            self.model = json.loads(body)["data"][0]["id"]
        except (HttpError, ValueError, LookupError, TypeError) as error:
            raise BenchError(f"no OpenAI-compatible server answers at {self.address.url} ({error})") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @property
    def first_error(self) -> str | None:
        """Why the first request failed that did."""
        return next((answer.error for answer in self.answers if answer.error), None)

    def raise_for_errors(self) -> None:
        if self.first_error:
            raise BenchError(f"{self.address.url} failed a request: {self.first_error}")

    async def complete(
        self, prompt: str, max_tokens: int, on_text: OnText | None = None, leave_after: int | None = None
    ) -> TimedResponse:
        """`leave_after`: go away when so many pieces of text have come."""
        return await self._stream("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens}, on_text, leave_after)

    async def chat(self, messages: Sequence[Message], max_tokens: int, leave_after: int | None = None) -> TimedResponse:
        body = {"messages": list(messages), "max_tokens": max_tokens}
        return await self._stream("/v1/chat/completions", body, None, leave_after)

    async def text(self, path: str) -> str:
        """What the server says there; nothing if it has no such page."""
        with suppress(BenchError):
            status, body = await self.address.fetch(path)
            if status == 200:
                return body.decode(errors="replace")
        return ""

    async def _stream(
        self, path: str, body: dict[str, Any], on_text: OnText | None, leave_after: int | None
    ) -> TimedResponse:
        body |= {
            "model": self.model,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = TimedResponse()
        self.answers.append(answer)
        reading = _Reading(answer, body["max_tokens"], on_text, leave_after)
        try:
            status = await self.address.ask("POST", path, json.dumps(body).encode(), on_body=reading.take)
            answer.error = reading.verdict(status)
        except _LeftError:
            answer.left = True
            answer.completion_tokens = len(answer.arrivals)
        except BenchError as error:
            answer.error = str(error)
        answer.finished = perf_counter()
        if answer.error is not None:
            await self._check_alive(answer.error)
        return answer

    async def _check_alive(self, error: str) -> None:
        """One failed answer is a figure; a server that is gone is the end of the work."""
        try:
            await self.address.fetch("/v1/models")
        except HttpError:
            raise ServerGoneError(f"the server at {self.address.url} is gone: {error}") from None


class _Reading:
    """One answer while it is read."""

    def __init__(self, answer: TimedResponse, asked: int, on_text: OnText | None, leave_after: int | None) -> None:
        self._answer = answer
        self._asked = asked
        self._on_text = on_text
        self._leave_after = leave_after
        self._events = EventReader()
        self._start = b""
        self._finish_reason: str | None = None

    def take(self, data: bytes, now: float) -> None:
        if len(self._start) < 300:
            self._start += data[:300]
        for payload in self._events.feed(data):
            if payload == b"[DONE]":
                continue
            try:
                has_text = self._add(json.loads(payload), now)
            except (ValueError, LookupError, TypeError, AttributeError):
                raise BenchError(f"the server sent an event that is not in OpenAI's format: {payload[:80]!r}") from None
            if has_text:
                arrivals = len(self._answer.arrivals)
                if self._on_text:
                    self._on_text(arrivals)
                if arrivals == self._leave_after:
                    raise _LeftError

    def verdict(self, status: int) -> str | None:
        """What is wrong with the whole answer, if anything is."""
        answer = self._answer
        if status != 200:
            return f"it answered {status}: {' '.join(self._start.decode(errors='replace').split())}"
        if not answer.completion_tokens:  # a server that knows no include_usage
            answer.completion_tokens = self._asked if self._finish_reason == "length" else len(answer.arrivals)
        if answer.completion_tokens != self._asked:
            return (
                f"got {answer.completion_tokens} tokens instead of {self._asked} (ignore_eos); "
                "the results are not comparable"
            )
        return None

    def _add(self, event: Mapping[str, Any], now: float) -> bool:
        """Take in one event; says whether it held text. The role event of a chat holds none."""
        answer = self._answer
        if event.get("error"):
            raise BenchError(f"the server aborted its answer: {event['error']}")
        if usage := event.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.completion_tokens = usage["completion_tokens"]
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in event.get("choices") or ():
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text:
                answer.texts.append(text)
                answer.arrivals.append(now)
                return True
        return False
