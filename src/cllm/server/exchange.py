"""One request and its answer on a connection: what ASGI applications receive and send."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from http import HTTPStatus
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Scope

from cllm.server.errors import Problem

DIRECT_SEND = "cllm.send"
"""The extension of ASGI's scope with which pieces of a long answer pass the middleware, which looks at none of them."""
log = logging.getLogger("cllm.server")

_NO_BODY = frozenset({204, 304})
_BREAKS_THE_HEAD = re.compile(rb"[\r\n\0]")
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}

Headers = list[tuple[bytes, bytes]]


class Line(Protocol):
    """What an exchange needs of its connection."""

    def write(self, data: bytes) -> None: ...

    def write_head(self, head: bytes) -> None:
        """The first bytes of an answer."""

    async def drain(self) -> None:
        """Until the client has read enough of what was written."""

    def answered(self) -> None:
        """The last byte of the answer was written."""

    def abort(self) -> None: ...

    @property
    def default_headers(self) -> Headers: ...


class Exchange:
    """From the first byte of a request to the last of its answer, or to the moment the client is gone.

    Of a body that is larger than `most_body` bytes no more is kept; whoever answers has to refuse it.
    """

    def __init__(self, line: Line, most_body: int) -> None:
        self.scope: Scope = {}
        self.url = b""
        self.headers: Headers = []
        self.keep_alive = False
        """Another request may follow on this connection."""
        self.received = False
        """The whole request is here."""
        self.started = False
        """Some of the answer has been written."""
        self.answered = False
        """All of it has."""
        self.chunked = False
        """The answer is sent in chunks: it was not said how long it is."""
        self.gone = False
        """The client left, or was sent away: nothing that is sent reaches anybody."""
        self._line = line
        self._most_body = most_body
        self._body = bytearray()
        self._end_told = False
        self._news = asyncio.Event()
        self._wants_continue = False
        self._head: bytes | None = None
        self._left: int | None = None
        """Bytes of the answer to come, where it said how many there are."""

    # -- the connection's side ---------------------------------------------------------------------------------

    def add_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._wants_continue = True
        self.headers.append((name, value))

    @property
    def held(self) -> int:
        """Bytes of the body that are kept here."""
        return len(self._body)

    def add_body(self, data: bytes) -> None:
        """Bodies are gathered in one piece: if many small ones were freed, their memory would stay with the process."""
        if self.answered or self.gone or self._is_too_large:
            return  # it was answered without looking at its body, or will be
        self._body += data
        if self._is_too_large:
            self._news.set()

    @property
    def _is_too_large(self) -> bool:
        return len(self._body) > self._most_body

    def end_body(self) -> None:
        self.received = True
        self._news.set()

    def leave(self) -> None:
        """There is nobody to answer any more."""
        self.gone = True
        self._body.clear()
        self._news.set()

    async def run(self, app: ASGIApp) -> None:
        """Have the request answered."""
        extensions = self.scope.setdefault("extensions", {})
        extensions[DIRECT_SEND] = self.send
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._line.abort()
            raise
        except Exception:
            log.exception("%s %s failed", self.scope["method"], self.scope["path"])
        finally:
            del extensions[DIRECT_SEND]  # it leads back here: whoever is done should go without the collector
        if not self.answered and not self.gone:
            await self._give_up()

    async def _give_up(self) -> None:
        if self.started:
            self._line.abort()
            return
        self._head = None
        body = b"Internal Server Error"
        headers = [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    # -- the application's side --------------------------------------------------------------------------------

    async def receive(self) -> Message:
        if self._wants_continue and not self.received and not self.started and not self.gone:
            self._line.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._wants_continue = False
        while not self.gone and not self.answered:
            if self._is_too_large or (self.received and not self._end_told):
                body = bytes(self._body)
                if self.received:
                    self._body.clear()
                self._end_told = self.received
                return {"type": "http.request", "body": body, "more_body": not self.received}
            self._news.clear()
            await self._news.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.gone:
            return
        if message["type"] == "http.response.start" and self._head is None:
            self._head = self._make_head(message["status"], message.get("headers", ()))
            return  # written with the first piece of the body, in one go
        if message["type"] != "http.response.body" or self._head is None or self.answered:
            raise RuntimeError(f"{message['type']} was sent at the wrong time")
        await self._line.drain()
        if not self.gone:
            self._write(message.get("body", b""), more=message.get("more_body", False))

    def _write(self, body: bytes, *, more: bool) -> None:
        framed = self._frame(body, more)
        if self.started:
            self._line.write(framed)
        else:
            assert self._head is not None
            self.started = True
            self._line.write_head(self._head + framed)
        if not more:
            self.answered = True
            self._body.clear()
            self._news.set()
            self._line.answered()

    def _frame(self, body: bytes, more: bool) -> bytes:
        if self.chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            return chunk if more else chunk + b"0\r\n\r\n"
        if self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the answer is not as long as its content-length")
        return b"" if self.scope["method"] == "HEAD" else body

    def _make_head(self, status: int, headers: Any) -> bytes:
        lines = [b"HTTP/1.1 %d %b" % (status, _REASONS.get(status, b""))]
        closes = False
        for name, value in (*self._line.default_headers, *headers):
            name = name.lower()
            if _BREAKS_THE_HEAD.search(name) or _BREAKS_THE_HEAD.search(value):
                raise RuntimeError(f"the header {name!r} of an answer holds a line break")
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection":
                closes = b"close" in value.lower()
            lines.append(b"%b: %b" % (name, value))
        if closes:
            self.keep_alive = False
        has_body = self.scope["method"] != "HEAD" and status not in _NO_BODY
        if self._left is None and has_body:
            # Before 1.1 there were no chunks: the end of the connection is the end of the answer.
            self.chunked = self.scope["http_version"] == "1.1"
            if self.chunked:
                lines.append(b"transfer-encoding: chunked")
        elif not has_body:
            self._left = None
        if not self.keep_alive and not closes:
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"


def refusal_of(exchange: Exchange | None, problem: Problem, default_headers: Headers) -> bytes:
    """The last answer on a connection, in the form that the refused request's endpoint has; there may be no request."""
    scope = {} if exchange is None else exchange.scope
    request_id = scope.get("state", {}).get("request_id") or uuid.uuid4().hex
    body = json.dumps(problem.body(scope.get("path", ""), request_id)).encode()
    lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}", "content-type: application/json"]
    lines += [f"content-length: {len(body)}", "connection: close", f"x-request-id: {request_id}"]
    lines += [f"{name}: {value}" for name, value in (problem.headers or {}).items()]
    head = "\r\n".join(lines).encode() + b"\r\n"
    return head + b"".join(b"%b: %b\r\n" % header for header in default_headers) + b"\r\n" + body
