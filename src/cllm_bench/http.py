"""Just enough of an HTTP client to read thousands of streamed events a second and to know when each of them came.

A general client spends more time on an event than a small model on a token, and that time would be reported as the
server's. This one stamps bytes the moment the event loop hands them over, before anything is parsed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from time import perf_counter
from urllib.parse import urlsplit

import httptools

from cllm_bench.errors import BenchError

CONNECT_LIMIT_S = 10.0
ANSWER_LIMIT_S = 900.0

OnBody = Callable[[bytes, float], None]
"""Gets each piece of a body and when it arrived."""


class HttpError(BenchError):
    """The connection failed, or what came was no HTTP."""


class ResponseReader:
    """The status and body of one response, wherever the network cut the bytes."""

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._until_close = True

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data`."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # Not the server's fault: Ctrl-C came during one of the methods below.
            raise (error.__context__ or error) from None
        except httptools.HttpParserError as error:
            raise HttpError(f"the server does not speak HTTP/1.1: {data[:80]!r} ({error})") from None
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return body

    def close(self) -> None:
        """The connection has ended; it may have ended too soon."""
        self.done = self.done or (self.status > 0 and self._until_close)
        if not self.done:
            raise HttpError("the connection was closed in the middle of an answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0  # such as 100, Continue: the real response follows

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.done = self.status > 0


class _Exchange(asyncio.Protocol):
    """One request and its response on a connection of its own."""

    def __init__(self, request: bytes, on_body: OnBody) -> None:
        self._loop = asyncio.get_running_loop()
        self._request = request
        self._on_body = on_body
        self._arrived: list[tuple[float, bytes]] = []
        self._transport: asyncio.WriteTransport | None = None
        self.reader = ResponseReader()
        self.finished: asyncio.Future[int] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        # Parsing waits until every connection that is ready has its time stamp: in a burst, the last one's text
        # would otherwise seem to have come when all the others' had been parsed.
        if not self._arrived:
            self._loop.call_soon(self._parse)
        self._arrived.append((perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self._parse()
        if not self.finished.done():
            try:
                self.reader.close()
                self.finished.set_result(self.reader.status)
            except HttpError as early:
                self.finished.set_exception(early)

    def end(self) -> None:
        """Close the connection. Nobody waits for the answer any more, whatever becomes of it."""
        if not self.finished.cancel() and not self.finished.cancelled():
            self.finished.exception()  # or asyncio would report it as one that nobody looked at
        if self._transport is not None:
            self._transport.abort()

    def _parse(self) -> None:
        arrived, self._arrived = self._arrived, []
        if self.finished.done():
            return
        try:
            for now, data in arrived:
                body = self.reader.feed(data)
                if body:
                    self._on_body(body, now)
        except Exception as error:
            self.finished.set_exception(error)
            return
        if self.reader.done and not self.finished.done():
            self.finished.set_result(self.reader.status)


class Address:
    """Where a server is: taken apart once, used for every request."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}"
        self._host, self._path = parts.hostname, parts.path
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        # A connection per request: reusing one races with servers that close it when idle, and an idle one
        # occupies a thread of llama-server.
        fixed = {"host": parts.netloc.rpartition("@")[2], "connection": "close", "accept-encoding": "identity"}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in {**fixed, **(headers or {})}.items())

    async def ask(
        self, method: str, path: str, body: bytes = b"", *, on_body: OnBody, limit_s: float = ANSWER_LIMIT_S
    ) -> int:
        """Send a request, hand the body over as it arrives, and return the status at its end."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        exchange = _Exchange(head.encode() + b"\r\n" + body, on_body)
        try:
            await self._connect(exchange)
            return await asyncio.wait_for(exchange.finished, limit_s)
        except asyncio.TimeoutError:
            raise HttpError(f"{self.url}{path} did not end its answer within {limit_s:g} s") from None
        finally:
            exchange.end()

    async def _connect(self, exchange: _Exchange) -> None:
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(lambda: exchange, self._host, self._port, ssl=self._ssl)
        try:
            await asyncio.wait_for(connecting, CONNECT_LIMIT_S)
        except (OSError, asyncio.TimeoutError) as error:
            raise HttpError(f"no connection to {self.url} ({error or 'no answer'})") from error

    async def fetch(self, path: str, limit_s: float = CONNECT_LIMIT_S) -> tuple[int, bytes]:
        """Status and whole body of a GET."""
        pieces: list[bytes] = []
        status = await self.ask("GET", path, on_body=lambda piece, _: pieces.append(piece), limit_s=limit_s)
        return status, b"".join(pieces)


class EventReader:
    """Turns raw bytes of server-sent events, cut anywhere, into the payloads of complete `data:` lines. The servers
    here send one line per event; comments and other fields are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
