"""Just enough HTTP/1.1 to read thousands of streamed events a second and to know when each of them came.

A general client spends more time on an event than a small model on a token, and that time would be reported as the
server's. This one stamps bytes the moment the event loop hands them over, before anything is parsed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from time import perf_counter
from urllib.parse import urlsplit

from cllm.errors import CLLMError

CONNECT_LIMIT_S = 10.0
ANSWER_LIMIT_S = 900.0
_MOST_HEAD = 65_536

OnBody = Callable[[bytes, float], None]
"""Gets each piece of a body and when it arrived."""


class BenchError(CLLMError):
    """A benchmark could not be run, or a server did not do what it was asked."""


class HttpError(BenchError):
    """The connection failed, or what came was no HTTP."""


class ResponseReader:
    """Cuts one response into status and body, wherever the network cut the bytes."""

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self._rest = b""
        self._chunked = False
        self._left: int | None = None
        """Bytes to come: of the body, or of the chunk with its line end. None: until the connection closes."""

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data`."""
        if not self.status:
            data = self._read_head(data)
            if not self.status:
                return b""
        if self._chunked:
            return self._dechunk(data)
        if self._left is None:
            return data
        body = data[: self._left]
        self._left -= len(body)
        self.done = self._left == 0
        return body

    def close(self) -> None:
        """The connection has ended; it may have ended too soon."""
        if self.status and not self._chunked and self._left is None:
            self.done = True
        if not self.done:
            raise HttpError("the connection was closed in the middle of an answer")

    def _read_head(self, data: bytes) -> bytes:
        """Take in the head once it is whole; what comes after it."""
        head, end, rest = (self._rest + data).partition(b"\r\n\r\n")
        if not end:
            self._rest = head
            if len(head) > _MOST_HEAD:
                raise HttpError("the server sent no end of its headers")
            return b""
        first, *lines = head.split(b"\r\n")
        version, _, status = first.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not status[:3].isdigit():
            raise HttpError(f"the server does not speak HTTP/1.1: {first[:80]!r}")
        self._rest = b""
        if status.startswith(b"1"):  # such as "100 Continue": the real response follows
            return self._read_head(rest)
        self.status = int(status[:3])
        headers = dict(_header(line) for line in lines)
        self._chunked = headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
        if self._chunked:
            self._left = 0
        elif b"content-length" in headers:
            self._left = int(headers[b"content-length"])
            self.done = self._left == 0
        return rest

    def _dechunk(self, data: bytes) -> bytes:
        data = self._rest + data
        self._rest = b""
        position = 0
        body = []
        left = self._left or 0
        while position < len(data) and not self.done:
            if left == 0:
                end = data.find(b"\r\n", position)
                if end < 0:
                    self._rest = data[position:]
                    break
                left = _chunk_size(data[position:end]) + 2
                position = end + 2
                self.done = left == 2
            else:
                # The last two bytes of a chunk are its line end.
                body.append(data[position : position + left - 2] if left > 2 else b"")
                taken = min(left, len(data) - position)
                left -= taken
                position += taken
        self._left = left
        return b"".join(body)


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip()


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise HttpError(f"the server sent {line[:40]!r} where the size of a chunk must stand") from None


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
            raise BenchError(f"{url!r} is no address of a server; it must be such as http://127.0.0.1:8000")
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
