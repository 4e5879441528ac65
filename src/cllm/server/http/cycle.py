"""One request and its response on a connection, as an ASGI application receives and sends them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Scope

from cllm.server.errors import Problem

if TYPE_CHECKING:
    from cllm.server.http.connection import Connection

DIRECT_SEND = "cllm.send"
"""The ASGI extension with which pieces of a long response bypass the middleware, which does not look at them."""
WHEN_GONE = "cllm.gone"
"""The ASGI extension with a future that is done when the client has disconnected."""
log = logging.getLogger("cllm.server")

_NO_BODY = frozenset({204, 304})
_BREAKS_THE_HEAD = re.compile(rb"[\r\n\0]")
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}

Headers = list[tuple[bytes, bytes]]


class RequestCycle:
    """From the first byte of a request to the last of its response, or until the client disconnects.

    No more than `most_body` bytes of a body are kept; the application must refuse a larger one.
    """

    def __init__(self, connection: Connection, most_body: int) -> None:
        self.scope: Scope = {}
        self.url = b""
        self.headers: Headers = []
        self.keep_alive = False
        """Whether another request may follow on this connection."""
        self.received = False
        """Whether the whole request has arrived."""
        self.started = False
        """Whether part of the response is written."""
        self.answered = False
        """Whether all of it is written."""
        self.chunked = False
        """Whether the response is chunked, because it has no content-length."""
        self.gone = False
        """Whether the client has disconnected or was cut off: what is sent now reaches nobody."""
        self._connection = connection
        self._most_body = most_body
        self._body = bytearray()
        self._end_sent = False
        self._news = asyncio.Event()
        self._wants_continue = False
        self._client_gone: asyncio.Future[None] | None = None
        self._head: bytes | None = None
        self._left: int | None = None
        """Bytes of the response still to come, if it has a content-length."""

    # -- the connection's side ---------------------------------------------------------------------------------

    def add_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._wants_continue = True
        self.headers.append((name, value))

    @property
    def held(self) -> int:
        """Bytes of the body that are in memory."""
        return len(self._body)

    def add_body(self, data: bytes) -> None:
        """A body is kept in one piece: freeing many small ones would leave the heap fragmented."""
        if self.answered or self.gone or self._is_too_large:
            return  # answered without its body, or about to be refused
        self._body += data
        if self._is_too_large:
            self._news.set()

    @property
    def _is_too_large(self) -> bool:
        return len(self._body) > self._most_body

    def end_body(self) -> None:
        self.received = True
        self._news.set()

    def disconnect(self) -> None:
        """The client has disconnected."""
        self.gone = True
        if self._client_gone is not None and not self._client_gone.done():
            self._client_gone.set_result(None)
        self._body.clear()
        self._news.set()

    async def run(self, app: ASGIApp) -> None:
        """Let the application answer the request."""
        extensions = self.scope.setdefault("extensions", {})
        extensions[DIRECT_SEND] = self.send
        extensions[WHEN_GONE] = self._client_gone = asyncio.get_running_loop().create_future()
        if self.gone:
            self._client_gone.set_result(None)
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._connection.abort()
            raise
        except Exception:
            log.exception("%s %s failed", self.scope["method"], self.scope["path"])
        finally:
            del extensions[DIRECT_SEND]  # breaks the reference cycle, so that no garbage collection is needed
        if not self.answered and not self.gone:
            await self._give_up()

    async def _give_up(self) -> None:
        if self.started:
            self._connection.abort()
            return
        self._head = None
        body = b"Internal Server Error"
        headers = [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    # -- the application's side --------------------------------------------------------------------------------

    async def receive(self) -> Message:
        if self._wants_continue and not self.received and not self.started and not self.gone:
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._wants_continue = False
        while not self.gone and not self.answered:
            if self._is_too_large or (self.received and not self._end_sent):
                body = bytes(self._body)
                if self.received:
                    self._body.clear()
                self._end_sent = self.received
                return {"type": "http.request", "body": body, "more_body": not self.received}
            self._news.clear()
            await self._news.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.gone:
            return
        if message["type"] == "http.response.start" and self._head is None:
            self._head = self._make_head(message["status"], message.get("headers", ()))
            return  # written together with the first piece of the body
        if message["type"] != "http.response.body" or self._head is None or self.answered:
            raise RuntimeError(f"{message['type']} sent out of order")
        await self._connection.drain()
        if not self.gone:
            self._write(message.get("body", b""), more=message.get("more_body", False))

    def _write(self, body: bytes, *, more: bool) -> None:
        framed = self._frame(body, more)
        if self.started:
            self._connection.write(framed)
        else:
            assert self._head is not None
            self.started = True
            self._connection.write_head(self._head + framed)
        if not more:
            self.answered = True
            self._body.clear()
            self._news.set()
            self._connection.answered()

    def _frame(self, body: bytes, more: bool) -> bytes:
        if self.chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            return chunk if more else chunk + b"0\r\n\r\n"
        if self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the response is not as long as its content-length")
        return b"" if self.scope["method"] == "HEAD" else body

    def _make_head(self, status: int, headers: Any) -> bytes:
        lines = [b"HTTP/1.1 %d %b" % (status, _REASONS.get(status, b""))]
        closes = False
        for name, value in (*self._connection.default_headers, *headers):
            name = name.lower()
            if _BREAKS_THE_HEAD.search(name) or _BREAKS_THE_HEAD.search(value):
                raise RuntimeError(f"the response header {name!r} contains a line break")
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection":
                closes = b"close" in value.lower()
            lines.append(b"%b: %b" % (name, value))
        if closes:
            self.keep_alive = False
        has_body = self.scope["method"] != "HEAD" and status not in _NO_BODY
        if self._left is None and has_body:
            # HTTP/1.0 has no chunks: the response ends with the connection.
            self.chunked = self.scope["http_version"] == "1.1"
            if self.chunked:
                lines.append(b"transfer-encoding: chunked")
        elif not has_body:
            self._left = None
        if not self.keep_alive and not closes:
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"


def refusal_of(cycle: RequestCycle | None, problem: Problem, default_headers: Headers) -> tuple[bytes, str]:
    """The last response on a connection, in the error format of the request's endpoint, and the request's id. There may
    be no request."""
    scope = {} if cycle is None else cycle.scope
    request_id = scope.get("state", {}).get("request_id") or uuid.uuid4().hex
    body = json.dumps(problem.body(scope.get("path", ""), request_id)).encode()
    lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}", "content-type: application/json"]
    lines += [f"content-length: {len(body)}", "connection: close", f"x-request-id: {request_id}"]
    lines += [f"{name}: {value}" for name, value in (problem.headers or {}).items()]
    head = "\r\n".join(lines).encode() + b"\r\n"
    return head + b"".join(b"%b: %b\r\n" % header for header in default_headers) + b"\r\n" + body, request_id
