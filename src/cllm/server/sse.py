"""Server-sent events: one per delta, all that are waiting in one write to the socket."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm.server.answers import Answers, unless_gone
from cllm.server.errors import ClientGoneError, problem_of
from cllm.server.exchange import DIRECT_SEND

if TYPE_CHECKING:
    from cllm.generation import Delta

DONE = "data: [DONE]\n\n"

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Events(Protocol):
    """How one API writes its stream."""

    def event(self, delta: Delta) -> str: ...

    def end(self, answers: Answers) -> str:
        """What follows the last delta."""


def data(content: Any) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


class EventStream(Response):
    """Submits, streams and cleans up, all within the call that answers the request.

    Nothing is sent before the first delta is there: a request that fails while it waits or in its
    prompt is answered with a status code like any other.
    """

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, events: Events) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._answers = answers
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._stream(scope, send))
        except ClientGoneError:
            return

    async def _write_batch(self, batch: list[Delta], write: Callable[[str], Awaitable[None]]) -> None:
        await write("".join([self._events.event(delta) for delta in batch]))

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
            async with self._answers as answers:
                async for batch in answers:
                    await self._write_batch(batch, partial(write, more=True))
            await write(self._events.end(answers), more=False)
        except Exception as error:
            if not started:
                raise
            problem = problem_of(error, request_id=scope["state"]["request_id"])
            await write(data(problem.body(scope["path"])), more=False)
