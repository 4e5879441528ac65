"""From bytes to requests, with an end to everything that a client could make endless."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn
from urllib.parse import unquote

import httptools

from cllm.server.errors import Problem
from cllm.server.exchange import Exchange

MOST_PIPELINED = 8
"""Requests that one slice of bytes may begin."""
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class RefusedError(Exception):
    """What came is no request, or too large a one."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class RequestReader:
    """Parses one connection's requests. `on_head` hears of each when its headers are there, `on_end` when all of it is.

    `begin` makes an exchange; `scope` is what the scopes of all requests hold.
    """

    def __init__(
        self,
        begin: Callable[[], Exchange],
        scope: Mapping[str, Any],
        most_head: int,
        on_head: Callable[[Exchange], None],
        on_end: Callable[[Exchange], None],
    ) -> None:
        self.incoming: Exchange | None = None
        """The request that is being parsed."""
        self._begin = begin
        self._scope = scope
        self._most_head = most_head
        self._tell_head = on_head
        self._tell_end = on_end
        self._parser = httptools.HttpRequestParser(self)
        self._in_head = True
        self._begun = 0
        """Requests that the slice at hand has begun."""
        self._known_bytes = 0
        """Of the request line and headers, where they are whole: exact."""
        self._head_bytes = self._body_bytes = self._framing_bytes = 0
        self._problem: Problem | None = None
        """Why a callback has stopped the parser."""
        self._asks_upgrade = False
        """The request at hand asks for another protocol, which is not to be had."""
        self._replays = False
        """The parser is being told again how a body is framed."""

    @property
    def between(self) -> bool:
        """Nothing of another request is here yet."""
        return self.incoming is None and not self._head_bytes

    def close(self) -> None:
        """Let go of the parser, which knows us: a ring that would wait for the garbage collector."""
        self._parser = None  # type: ignore[assignment]

    def feed(self, piece: bytes) -> None:
        """Parse a slice of a few kilobytes. The limits hold to within one slice for what the parser keeps to itself."""
        was_in_head, was, body_before = self._in_head, self.incoming, self._body_bytes
        self._begun = 0
        try:
            self._parse(piece)
        except httptools.HttpParserCallbackError:
            raise RefusedError(self._problem or _bad("the target of the request is not valid")) from None
        except httptools.HttpParserError as error:
            raise RefusedError(_bad(str(error))) from None
        if self._in_head:
            if was_in_head and was in (None, self.incoming):
                self._head_bytes += len(piece)
        elif not was_in_head and self.incoming is was:
            self._framing_bytes += len(piece) - (self._body_bytes - body_before)
        if self._head_bytes > self._most_head:
            raise RefusedError(self._headers_too_large())
        if self._framing_bytes > self._most_head + self._body_bytes:
            raise RefusedError(self._too_much("The chunk framing is larger"))

    def _parse(self, piece: bytes) -> None:
        """A parser takes all that follows an upgrade for the other protocol's. We have none, and what follows is the
        request's body: another parser reads on, after a head that frames the body in the same way."""
        while True:
            try:
                self._parser.feed_data(piece)
                return
            except httptools.HttpParserUpgrade as upgrade:
                piece = piece[upgrade.args[0] :]
            assert self.incoming is not None
            framing = [header for header in self.incoming.headers if header[0] in _FRAMING]
            self._asks_upgrade, self._replays = False, True
            self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % each for each in framing))

    def _headers_too_large(self) -> Problem:
        return self._too_much("The request line and headers are larger")

    def _too_much(self, what: str) -> Problem:
        message = f"{what} than {self._most_head} bytes (server.max_header_bytes)."
        return Problem(431, "invalid_request_error", message, code="headers_too_large")

    # -- what the parser finds ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._replays:
            return
        self._begun += 1
        if self._begun > MOST_PIPELINED:
            self._stop(_bad(f"more than {MOST_PIPELINED} requests came at once"))
        self.incoming = self._begin()
        self._in_head = True
        self._known_bytes = 0

    def on_url(self, url: bytes) -> None:
        assert self.incoming is not None
        if self._replays:
            return
        self.incoming.url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.incoming is not None
        if self._in_head:  # otherwise it is a trailer, or known
            self._count(len(name) + len(value) + len(b": \r\n"))
            self.incoming.add_header(name, value)

    def on_headers_complete(self) -> None:
        exchange = self.incoming
        assert exchange is not None
        if self._replays:
            self._replays = False
            return
        url = httptools.parse_url(exchange.url)
        version = self._parser.get_http_version()
        exchange.keep_alive = version == "1.1" and self._parser.should_keep_alive()
        exchange.scope = {
            **self._scope,
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "path": self._scope["root_path"] + unquote(url.path.decode("ascii")),
            "raw_path": self._scope["root_path"].encode() + url.path,
            "query_string": url.query or b"",
            "headers": exchange.headers,
            "state": self._scope["state"].copy(),
        }
        self._in_head = False
        self._asks_upgrade = self._parser.should_upgrade()
        self._head_bytes = self._body_bytes = self._framing_bytes = 0
        self._tell_head(exchange)

    def on_body(self, body: bytes) -> None:
        assert self.incoming is not None
        self._body_bytes += len(body)
        self.incoming.add_body(body)

    def on_message_complete(self) -> None:
        if self._asks_upgrade:
            return  # so the parser says of every such request, whether it has a body or not
        done, self.incoming = self.incoming, None
        assert done is not None
        self._in_head = True
        self._framing_bytes = 0
        done.end_body()
        self._tell_end(done)

    def _count(self, size: int) -> None:
        self._known_bytes += size
        if self._known_bytes > self._most_head:
            self._stop(self._headers_too_large())

    def _stop(self, problem: Problem) -> NoReturn:
        self._problem = problem
        raise ValueError(problem.message)


def _bad(why: str) -> Problem:
    return Problem(400, "invalid_request_error", f"Malformed HTTP request: {why}.", code="bad_request")
