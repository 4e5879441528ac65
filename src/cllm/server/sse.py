"""Server-sent events: one per delta or piece, all that are waiting in one write to the socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm.server.answers import Counts, unless_gone
from cllm.server.errors import ClientGoneError, Problem, note_refusal, problem_of
from cllm.server.pulse import Progress, Pulse, Wire

T = TypeVar("T")
Out = TypeVar("Out", covariant=True)
In = TypeVar("In", contravariant=True)

DONE = "data: [DONE]\n\n"

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Source(Counts, Protocol[Out]):
    """What is streamed, in batches: entering it submits, leaving it cleans up."""

    async def __aenter__(self) -> object: ...
    async def __aexit__(self, *_: object) -> None: ...
    def __aiter__(self) -> AsyncIterator[Sequence[Out]]: ...


class Events(Protocol[In]):
    """How one API writes its stream."""

    def event(self, item: In, /) -> str: ...

    def end(self, counts: Counts, /) -> str:
        """What follows the last item."""


def data(content: Any) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


class EventStream(Response):
    """Submits, streams and cleans up, all within the call that answers the request.

    Nothing is sent before the first delta is there, or what a `Pulse` says meanwhile: a request that fails before that
    is answered with a status code like any other.
    """

    media_type = "text/event-stream"
    comments = True
    """Whether silence may be filled with them."""

    def __init__(self, source: Source[T], events: Events[T], progress: Progress | None = None) -> None:
        """`progress` writes the events that say how far the prompt is, for those who ask for them."""
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._source: Source[Any] = source
        self._events: Events[Any] = events
        self._progress = progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._stream(scope, send))
        except ClientGoneError:
            return

    async def _write_batch(self, wire: Wire, before: str, batch: Sequence[Any]) -> None:
        event = self._events.event
        await wire.write(before + "".join([event(item) for item in batch]), more=True)

    async def _stream(self, scope: Scope, send: Send) -> None:
        wire = Wire(scope, send, self.raw_headers)
        every_s: float = scope["app"].state.cllm.config.server.sse_keepalive_s if self.comments else 0
        try:
            async with self._source:
                pulse = Pulse(wire, self._source, every_s, self._progress)
                try:
                    await self._pass_on(wire, pulse)
                finally:
                    await pulse.stop()
            await self._finish(wire)
        except Exception as error:
            if not wire.started:
                raise
            problem = problem_of(error, request_id=scope["state"]["request_id"])
            note_refusal(problem, scope)
            await wire.write(self._failure(problem, scope), more=False)

    async def _finish(self, wire: Wire) -> None:
        await wire.write(self._events.end(self._source), more=False)

    def _failure(self, problem: Problem, scope: Scope) -> str:
        """What ends a stream that has begun and cannot go on."""
        return data(problem.body(scope["path"], scope["state"]["request_id"]))

    async def _pass_on(self, wire: Wire, pulse: Pulse) -> None:
        before: str | None = None
        async for batch in self._source:
            if before is None:
                before = pulse.begin_answer()
            if pulse.writing is not None:
                await pulse.writing
                pulse.writing = None
            await self._write_batch(wire, before, batch)
            before = ""
