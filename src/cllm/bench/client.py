"""A light streaming client: asks an OpenAI-compatible server and writes down when text arrived."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, TypeVar

import httpx

from cllm.bench.sse import EventReader
from cllm.errors import CLLMError

T = TypeVar("T")
Message = Mapping[str, str]
OnText = Callable[[int], None]
"""Called at each arrival of text with the number of arrivals so far."""


class BenchError(CLLMError):
    """A benchmark could not be run, or a server did not do what it was asked."""


class Answer:
    """One streamed answer as its client saw it. Times are `perf_counter` seconds."""

    __slots__ = ("arrivals", "cached_tokens", "completion_tokens", "finished", "prompt_tokens", "started", "texts")

    def __init__(self) -> None:
        self.started = perf_counter()
        self.finished = self.started
        self.arrivals: list[float] = []
        """When text came in: one entry per event that held some, whatever its number of tokens."""
        self.texts: list[str] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def seconds(self) -> float:
        return self.finished - self.started

    @property
    def ttft(self) -> float:
        """Seconds to the first text; to the end, if there never was any."""
        return (self.arrivals[0] if self.arrivals else self.finished) - self.started

    @property
    def gaps(self) -> list[float]:
        """Seconds between two arrivals, as the reader of the stream feels them."""
        return [later - sooner for sooner, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def longest_silence(self) -> float:
        """The worst gap; one between the last text and the end counts, too."""
        return max([*self.gaps, self.finished - self.arrivals[-1]]) if self.arrivals else self.seconds

    @property
    def seconds_per_token(self) -> float:
        """Mean over all tokens after the first, however they were packed into events."""
        return (self.seconds - self.ttft) / (self.completion_tokens - 1)

    def add(self, event: Mapping[str, Any], now: float) -> bool:
        """Take in one event; says whether it held text. The role event of a chat holds none."""
        if event.get("error"):
            raise BenchError(f"the server broke off its answer: {event['error']}")
        if usage := event.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text:
                self.texts.append(text)
                self.arrivals.append(now)
                return True
        return False


class Client:
    """Speaks to one server. Every request is greedy and runs to its full length, so that all do the same work."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._model = ""
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(900.0, connect=10.0),
            # A connection per request: reusing one races with servers that close it when idle, and an idle one
            # occupies a thread of llama-server.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"accept-encoding": "identity", "connection": "close"},
        )

    async def __aenter__(self) -> Client:
        try:
            response = await self._http.get("/v1/models")
            self._model = response.raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            await self._http.aclose()
            raise BenchError(f"no OpenAI-compatible server answers at {self.url} ({error!r})") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def complete(self, prompt: str, max_tokens: int, on_text: OnText | None = None) -> Answer:
        return await self._stream("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens}, on_text)

    async def chat(self, messages: Sequence[Message], max_tokens: int) -> Answer:
        body = {"messages": list(messages), "max_tokens": max_tokens}
        return await self._stream("/v1/chat/completions", body, None)

    async def _stream(self, path: str, body: dict[str, Any], on_text: OnText | None) -> Answer:
        body |= {
            "model": self._model,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        events = EventReader()
        answer = Answer()
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")[:300]
                    raise BenchError(f"{self.url}{path} answered {response.status_code}: {text}")
                async for data in response.aiter_raw():
                    now = perf_counter()
                    for payload in events.feed(data):
                        if payload != b"[DONE]" and answer.add(json.loads(payload), now) and on_text:
                            on_text(len(answer.arrivals))
        except httpx.HTTPError as error:
            raise BenchError(f"{self.url}{path} failed in the middle of the work: {error!r}") from error
        answer.finished = perf_counter()
        if answer.completion_tokens != body["max_tokens"]:
            raise BenchError(
                f"{self.url}{path} reports {answer.completion_tokens} tokens in its usage where "
                f"{body['max_tokens']} were asked for with ignore_eos; the figures would not compare"
            )
        return answer


async def at_most(limit: int, jobs: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run the jobs in order, `limit` at a time; their results in order. The first failure ends the others."""
    waiting = list(enumerate(jobs))[::-1]
    results: dict[int, T] = {}

    async def worker() -> None:
        while waiting:
            index, job = waiting.pop()
            results[index] = await job()

    tasks = [asyncio.create_task(worker()) for _ in range(limit)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [results[index] for index in sorted(results)]
