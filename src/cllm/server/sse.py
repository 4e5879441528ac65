"""Server-sent events: one per delta or piece, all that are waiting in one write to the socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm.server.answers import Counts, unless_gone
from cllm.server.errors import ClientGoneError, problem_of
from cllm.server.exchange import DIRECT_SEND

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

    Nothing is sent before the first delta is there: a request that fails while it waits or in its
    prompt is answered with a status code like any other.
    """

    media_type = "text/event-stream"

    def __init__(self, source: Source[T], events: Events[T]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._source: Source[Any] = source
        self._events: Events[Any] = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._stream(scope, send))
        except ClientGoneError:
            return

    async def _stream(self, scope: Scope, send: Send) -> None:
        started = False
        direct: Send = scope.get("extensions", {}).get(DIRECT_SEND, send)

        async def write(text: str, *, more: bool) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            passes = direct if more else send
            await passes({"type": "http.response.body", "body": text.encode(), "more_body": more})

        try:
            async with self._source:
                async for batch in self._source:
                    await write("".join([self._events.event(item) for item in batch]), more=True)
            await write(self._events.end(self._source), more=False)
        except Exception as error:
            if not started:
                raise
            problem = problem_of(error, request_id=scope["state"]["request_id"])
            await write(data(problem.body(scope["path"])), more=False)
