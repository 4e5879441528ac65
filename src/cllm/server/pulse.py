"""What a stream says while it has no answer to send: how far the prompt is, and signs of life for proxies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.types import Scope, Send

from cllm.server.exchange import DIRECT_SEND

if TYPE_CHECKING:
    from cllm.server.answers import Counts

PROGRESS_S = 0.25
"""How often a prompt's progress is looked at."""
_START = "http.response.start"
_BODY = "http.response.body"

Progress = Callable[["Counts", int], str]
"""The event that says how far a prompt is, from its numbers and the milliseconds since it came."""


class Wire:
    """The way to the client. The head of the answer goes out with the first text."""

    def __init__(self, scope: Scope, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = False
        self.busy = False
        """Whether a text is on its way."""
        self.last = time.monotonic()
        """When the last one was."""
        self._send = send
        self._direct: Send = scope.get("extensions", {}).get(DIRECT_SEND, send)
        self._headers = headers

    async def write(self, text: str, *, more: bool) -> None:
        self.busy = True
        if not self.started:
            self.started = True
            await self._send({"type": _START, "status": 200, "headers": self._headers})
        await (self._direct if more else self._send)({"type": _BODY, "body": text.encode(), "more_body": more})
        self.last = time.monotonic()
        self.busy = False


class Pulse:
    """Writes by itself whenever the wire has been silent for long enough. It costs a timer, and nothing per token."""

    def __init__(self, wire: Wire, counts: Counts, every_s: float, progress: Progress | None) -> None:
        """`every_s`: seconds of silence until a comment is sent; 0: never. `progress`: until the answer begins."""
        self._wire = wire
        self._counts = counts
        self._every_s = every_s
        self._progress = progress
        self._told = -1
        self._begun_at = time.monotonic()
        self._answering = False
        self._timer: asyncio.TimerHandle | None = None
        self.writing: asyncio.Task[None] | None = None
        """What goes first, if somebody else has to write."""
        self._wait()

    def begin_answer(self) -> str:
        """The first text is here: what there is to say before it."""
        self._answering = True
        return self._progress_event()

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.writing is not None:
            self.writing.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self.writing

    def _wait(self) -> None:
        watches = self._progress is not None and not self._answering
        delay = self._until_comment() if self._every_s else None
        if watches:
            delay = PROGRESS_S if delay is None else min(PROGRESS_S, delay)
        if delay is not None:
            self._timer = asyncio.get_running_loop().call_later(max(delay, 0.001), self._beat)

    def _until_comment(self) -> float:
        return self._wire.last + self._every_s - time.monotonic()

    def _beat(self) -> None:
        text = "" if self._wire.busy else self._next()
        if text:
            self._wire.busy = True
            self._wire.last = time.monotonic()
            self.writing = asyncio.ensure_future(self._wire.write(text, more=True))
        elif self._wire.busy:
            self._wire.last = time.monotonic()
        self._wait()

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
        """Only if there is something new."""
        computed = self._counts.computed_tokens
        if self._progress is None or computed == self._told:
            return ""
        self._told = computed
        return self._progress(self._counts, round((time.monotonic() - self._begun_at) * 1000))


def progress_json(counts: Counts, time_ms: int) -> str:
    """As llama-server writes it."""
    return (
        f'{{"total":{counts.prompt_tokens},"cache":{counts.cached_tokens},"processed":{counts.computed_tokens},'
        f'"time_ms":{time_ms}}}'
    )
