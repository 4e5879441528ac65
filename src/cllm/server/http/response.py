"""How responses are written, whatever the API: JSON in slices, and server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm.server.errors import ClientGoneError, Problem, note_refusal, problem_of
from cllm.server.http.cycle import DIRECT_SEND

T = TypeVar("T")
Out = TypeVar("Out", covariant=True)
In = TypeVar("In", contravariant=True)

DONE = "data: [DONE]\n\n"
SLICE_BYTES = 16_384
"""Encoding this much takes about a millisecond,"""
_SLICE_S = 0.002
"""unless it is work of another kind: a slice that took this long ends, however short it is."""
_BUSY_S = 0.004
_REST_S = 0.003
PROGRESS_S = 0.25
"""How often a prompt's progress is checked."""
_ENTRIES = 16
_CHARACTERS = 16_384
_START = "http.response.start"
_BODY = "http.response.body"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client disconnects."""
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


class Turns:
    """Give others a turn between two pieces of one work.

    To give up the loop is not enough: whoever sends and polls again and again holds the interpreter for less than its
    switch interval each time, so the engine's thread, which waits for that interval, hardly ever gets it. All streams
    stood while a response of 60 MB was written. A sleep now and then, long enough for a thread to wake up on busy
    cores, lets it in.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def give(self) -> None:
        if time.perf_counter() - self._since < _BUSY_S:
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(_REST_S)
            self._since = time.perf_counter()


# -- JSON ------------------------------------------------------------------------------------------------------------


def as_bytes(text: str) -> bytes:
    """Half a surrogate pair, which a client may have sent where nothing looks at it, becomes a question mark."""
    return text.encode(errors="replace")


def as_json(value: Any) -> str:
    return _ENCODER.encode(value)


def numbers_json(values: Sequence[float]) -> str:
    """`as_json` of many numbers, in a fifth of the time. They must be finite."""
    return to_json(values).decode()


def text_pieces(*texts: str) -> Iterator[str]:
    """One JSON string that holds all texts, in pieces."""
    yield '"'
    for text in texts:
        for start in range(0, len(text), _CHARACTERS):
            yield as_json(text[start : start + _CHARACTERS])[1:-1]
    yield '"'


def list_pieces(items: Iterable[str], entries: int = _ENTRIES) -> Iterator[str]:
    """A JSON list of items that are JSON already, `entries` at a time."""
    rest = iter(items)
    start = "["
    while some := list(islice(rest, entries)):
        yield start + ",".join(some)
        start = ","
    yield "[]" if start == "[" else "]"


def slices(pieces: Iterable[str]) -> Iterator[str]:
    """Pieces joined into slices of about `SLICE_BYTES` characters, or of less if making them takes long."""
    held: list[str] = []
    size, since = 0, time.perf_counter()
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= SLICE_BYTES or time.perf_counter() - since >= _SLICE_S:
            yield "".join(held)
            held, size, since = [], 0, time.perf_counter()
    if held:
        yield "".join(held)


def with_more(pieces: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Each piece, and whether another one follows."""
    rest = iter(pieces)
    held = next(rest, "")
    for piece in rest:
        yield held, True
        held = piece
    yield held, False


class SlicedJsonResponse(Response):
    """A JSON body of any size, sent in slices so that other requests' events go out in between."""

    media_type = "application/json"

    def __init__(self, pieces: Iterable[str]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._slices = with_more(slices(pieces))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        text, more = next(self._slices)
        body, headers = as_bytes(text), self.raw_headers
        if not more:
            headers = [*headers, (b"content-length", str(len(body)).encode())]
        await send({"type": _START, "status": self.status_code, "headers": headers})
        await send({"type": _BODY, "body": body, "more_body": more})
        if more:
            with suppress(ClientGoneError):
                await unless_gone(receive, self._send_rest(send))

    async def _send_rest(self, send: Send) -> None:
        turns = Turns()
        for text, more in self._slices:
            await turns.give()
            await send({"type": _BODY, "body": as_bytes(text), "more_body": more})


# -- server-sent events ----------------------------------------------------------------------------------------------


def data(content: Any) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


class CacheDetails(NamedTuple):
    """Why so much of a prompt was computed."""

    known_tokens: int
    """Found in the cache, whether all layers could go on behind them or not."""
    computed_tokens: int


class TokenCounts(Protocol):
    """What a request has cost so far."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that are computed so far, cached ones included."""

    @property
    def completion_tokens(self) -> int: ...
    @property
    def cache_details(self) -> CacheDetails | None:
        """None unless they are asked for."""


class PromptProgress(NamedTuple):
    """How much of a request's prompts is computed, as llama-server reports it."""

    total: int
    cache: int
    """Tokens found in the cache."""
    processed: int
    """Tokens computed so far, cached ones included."""
    time_ms: int
    """Since the request came."""

    def json(self) -> str:
        return as_json(self._asdict())


ProgressEvent = Callable[[PromptProgress], str]
"""Writes the event that reports a prompt's progress."""


class DeltaSource(TokenCounts, Protocol[Out]):
    """What is streamed: batches of deltas. Entering it submits, leaving it cleans up."""

    async def __aenter__(self) -> object: ...
    async def __aexit__(self, *_: object) -> None: ...
    def __aiter__(self) -> AsyncIterator[Sequence[Out]]: ...


class Events(Protocol[In]):
    """How an API writes its stream."""

    def event(self, item: In, /) -> str: ...

    def end(self, counts: TokenCounts, /) -> str:
        """What follows the last event."""


class ResponseWriter:
    """Writes a streamed response. Its head goes out with the first text."""

    def __init__(self, scope: Scope, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = False
        self.busy = False
        """Whether a write is under way."""
        self.last = time.monotonic()
        """When the last write ended."""
        self._send = send
        self._direct: Send = scope.get("extensions", {}).get(DIRECT_SEND, send)
        self._headers = headers

    async def write(self, text: str, *, more: bool) -> None:
        self.busy = True
        body = as_bytes(text)
        if not self.started:
            self.started = True
            await self._send({"type": _START, "status": 200, "headers": self._headers})
        await (self._direct if more else self._send)({"type": _BODY, "body": body, "more_body": more})
        self.last = time.monotonic()
        self.busy = False


class KeepAlive:
    """Writes comments, and the prompt's progress, while there is no answer to send: proxies close silent connections.
    It costs a timer per request, and nothing per token."""

    def __init__(
        self, writer: ResponseWriter, counts: TokenCounts, every_s: float, progress: ProgressEvent | None
    ) -> None:
        """`every_s`: seconds of silence before a comment; 0: none. `progress`: reported until the answer begins."""
        self._writer = writer
        self._counts = counts
        self._every_s = every_s
        self._progress = progress
        self._reported = 0
        self._begun_at = time.monotonic()
        self._answering = False
        self._timer: asyncio.TimerHandle | None = None
        self.writing: asyncio.Task[None] | None = None
        """A write that must end before the next one."""
        self._start_timer()

    def begin_answer(self) -> str:
        """What to write before the first text."""
        self._answering = True
        return self._progress_event()

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.writing is not None:
            self.writing.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self.writing

    def _start_timer(self) -> None:
        watches = self._progress is not None and not self._answering
        delay = self._until_comment() if self._every_s else None
        if watches:
            delay = PROGRESS_S if delay is None else min(PROGRESS_S, delay)
        if delay is not None:
            self._timer = asyncio.get_running_loop().call_later(max(delay, 0.001), self._on_timer)

    def _until_comment(self) -> float:
        return self._writer.last + self._every_s - time.monotonic()

    def _on_timer(self) -> None:
        text = "" if self._writer.busy else self._next()
        if text:
            self._writer.busy = True
            self._writer.last = time.monotonic()
            self.writing = asyncio.ensure_future(self._writer.write(text, more=True))
        elif self._writer.busy:
            self._writer.last = time.monotonic()
        self._start_timer()

    def _next(self) -> str:
        if not self._answering and (event := self._progress_event()):
            return event
        if self._every_s and self._until_comment() <= 0:
            counts = self._counts
            if self._answering:
                return ": keep-alive\n\n"
            return f": {counts.computed_tokens} of {counts.prompt_tokens} prompt tokens\n\n"
        return ""

    def _progress_event(self) -> str:
        """Empty if nothing has changed. The first report is of what was cached, which is known once anything is."""
        computed, cached = self._counts.computed_tokens, self._counts.cached_tokens
        if self._progress is None or not computed or computed == self._reported:
            return ""
        reports = [computed] if self._reported or computed == cached else [cached, computed]
        self._reported = computed
        total, time_ms = self._counts.prompt_tokens, round((time.monotonic() - self._begun_at) * 1000)
        return "".join([self._progress(PromptProgress(total, cached, each, time_ms)) for each in reports])


class EventStream(Response):
    """Server-sent events: one per delta, all that are waiting in one write. Submits, streams and cleans up, all within
    the call that answers the request.

    Nothing is sent before the first delta, or the first comment of `KeepAlive`: a request that fails earlier gets a
    status code like any other.
    """

    media_type = "text/event-stream"
    comments = True
    """Whether comments may keep the connection alive."""

    def __init__(self, source: DeltaSource[T], events: Events[T], progress: ProgressEvent | None = None) -> None:
        """`progress` writes events that report the prompt's progress, if the client asked for them."""
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._source: DeltaSource[Any] = source
        self._events: Events[Any] = events
        self._progress = progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGoneError):
            await unless_gone(receive, self._stream(scope, send))

    async def _write_batch(self, writer: ResponseWriter, before: str, batch: Sequence[Any]) -> None:
        event = self._events.event
        await writer.write(before + "".join([event(item) for item in batch]), more=True)

    async def _stream(self, scope: Scope, send: Send) -> None:
        writer = ResponseWriter(scope, send, self.raw_headers)
        every_s: float = scope["app"].state.cllm.config.server.sse_keepalive_s if self.comments else 0
        try:
            async with self._source:
                keep_alive = KeepAlive(writer, self._source, every_s, self._progress)
                try:
                    await self._pass_on(writer, keep_alive)
                finally:
                    await keep_alive.stop()
            await self._finish(writer)
        except Exception as error:
            if not writer.started:
                raise
            problem = problem_of(error, request_id=scope["state"]["request_id"])
            note_refusal(problem, scope)
            await writer.write(self._failure(problem, scope), more=False)

    async def _finish(self, writer: ResponseWriter) -> None:
        await writer.write(self._events.end(self._source), more=False)

    def _failure(self, problem: Problem, scope: Scope) -> str:
        """The last event of a stream that failed."""
        return data(problem.body(scope["path"], scope["state"]["request_id"]))

    async def _pass_on(self, writer: ResponseWriter, keep_alive: KeepAlive) -> None:
        before: str | None = None
        async for batch in self._source:
            if before is None:
                before = keep_alive.begin_answer()
            if keep_alive.writing is not None:
                await keep_alive.writing
                keep_alive.writing = None
            await self._write_batch(writer, before, batch)
            before = ""


class SlicedEvents(Events[In], Protocol[In]):
    """Events of which the first ones may be long."""

    def pieces(self, item: In, /) -> Iterator[str]: ...


class SlicedEventStream(EventStream):
    """A stream whose events are written a slice at a time: others' go out between two of them."""

    def __init__(self, source: DeltaSource[T], events: SlicedEvents[T], progress: ProgressEvent | None = None) -> None:
        super().__init__(source, events, progress)
        self._pieces = events.pieces

    async def _write_batch(self, writer: ResponseWriter, before: str, batch: Sequence[Any]) -> None:
        turns = Turns()
        for part in slices(chain([before], chain.from_iterable(map(self._pieces, batch)))):
            await writer.write(part, more=True)
            await turns.give()
