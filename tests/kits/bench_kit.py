"""A small server that speaks OpenAI's streams, and what else the tests of the benchmarks share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from cllm.cli import main
from cllm_bench.figures import Run
from cllm_bench.response import TimedResponse
from cllm_bench.workloads.base import Setup, Workload

Events = Iterator[dict[str, Any]]


def words(text: str) -> list[int]:
    """A tokenizer for tests: one token per word."""
    return [len(word) for word in text.split()]


def plain_answer(body: dict[str, Any], prompt_tokens: int) -> Events:
    """One token per event; a role event first in chats; usage in an event of its own."""
    is_chat = "messages" in body
    if is_chat:
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    for number_of_token in range(body["max_tokens"]):
        text = f"w{number_of_token} "
        yield {"choices": [{"index": 0, "delta": {"content": text}} if is_chat else {"index": 0, "text": text}]}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": body["max_tokens"]}
    yield {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 1}}}


@dataclass
class TinyServer:
    """Just enough HTTP to be driven: a model list and streamed answers."""

    answer: Callable[[dict[str, Any], int], Events] = plain_answer
    status: int = 200
    dies_at: int | None = None
    """The request at which it goes away for good, in the middle of its answer."""
    pages: dict[str, bytes] = field(default_factory=dict)
    """What it answers to GET, beside its models."""
    heads: list[bytes] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by each request."""
    running: int = 0
    most_running: int = 0
    url: str = ""
    _listener: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            _, _, length = head.lower().partition(b"content-length:")
            body = await reader.readexactly(int(length.split()[0]) if length else 0)
            if head.startswith(b"GET"):
                path = head.split()[1].decode()
                found = self.pages.get(path) if path != "/v1/models" else b'{"data": [{"id": "tiny"}]}'
                self._send(writer, 404 if found is None else 200, found or b"")
            elif self.status != 200:
                self._send(writer, self.status, b'{"error": {"message": "no room"}}')
            else:
                await self._stream(writer, json.loads(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        self.asked.set()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        prompt = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
        try:
            for event in self.answer(body, len(words(prompt))):
                self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")
                await writer.drain()
                await asyncio.sleep(0)
                if self.dies_at is not None and len(self.bodies) >= self.dies_at:
                    self.die()
                    return
        finally:
            self.running -= 1
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def die(self) -> None:
        assert self._listener is not None
        self._listener.close()
        for writer in self._writers:
            writer.transport.abort()

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    @staticmethod
    def _send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


@asynccontextmanager
async def serving(server: TinyServer) -> AsyncIterator[TinyServer]:
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server._listener = listener
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()


def setup_for(url: str, *against: str, repeats: int = 1) -> Setup:
    return Setup(model="tiny", encode=words, threads=1, repeats=repeats, url=url, against=against)


async def measured(workload: Workload, setup: Setup) -> list[Run]:
    runs: list[Run] = []
    await workload.measure(setup, runs.append)
    return runs


def make_answer(
    started: float, *arrivals: float, tokens: int | None = None, finished: float | None = None
) -> TimedResponse:
    """An answer whose times are given; it ends with its last text unless told."""
    answer = TimedResponse()
    answer.started = started
    answer.arrivals = list(arrivals)
    answer.finished = finished if finished is not None else (arrivals[-1] if arrivals else started)
    answer.completion_tokens = len(arrivals) if tokens is None else tokens
    return answer


def bench(*args: str) -> int:
    """The exit code of `cllm bench`."""
    with pytest.raises(SystemExit) as end:
        main(["bench", *args])
    assert isinstance(end.value.code, int)
    return end.value.code
