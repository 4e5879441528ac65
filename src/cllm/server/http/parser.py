"""Parses requests, and limits everything that a client could make endless."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote

import httptools

from cllm.server.errors import Problem
from cllm.server.http.cycle import RequestCycle

_VERSIONS = frozenset({"1.0", "1.1"})
_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.~_-]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?", re.ASCII)
"""A name or an address and a port, as a URI has them."""


class Target(NamedTuple):
    """What the request line asks for."""

    path: bytes
    query: bytes


def malformed(why: str) -> Problem:
    return Problem(400, "invalid_request_error", f"Malformed HTTP request: {why}.", code="bad_request")


def other_version(version: str) -> Problem:
    message = f"{version} is not supported; use HTTP/1.1."
    return Problem(505, "invalid_request_error", message, code="http_version_not_supported")


def problem_of_head(version: str, headers: Iterable[tuple[bytes, bytes]]) -> Problem | None:
    """What RFC 9112 forbids, as far as httptools lets it through: where a proxy in front reads a request differently
    than the server behind it, one client can slip its bytes into another's request. `headers` have lower-case names."""
    if version not in _VERSIONS:
        return other_version(f"HTTP/{version}")
    hosts = [value for name, value in headers if name == b"host"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if len(hosts) > 1:
        return malformed("more than one Host header")
    if not hosts and version == "1.1":
        return malformed("no Host header")
    if hosts and not _HOST.fullmatch(hosts[0]):
        return malformed(f"{_shown(hosts[0])} is not a valid Host")
    return _problem_of_codings(version, codings) if codings else None


def _problem_of_codings(version: str, codings: list[bytes]) -> Problem | None:
    if version == "1.0":
        return malformed("Transfer-Encoding in HTTP/1.0")
    coding = b", ".join(codings)
    if coding.lower() == b"chunked":
        return None
    message = f"The transfer coding {_shown(coding)} is not supported; use chunked alone."
    return Problem(501, "invalid_request_error", message, code="transfer_coding_not_supported")


def target_of(method: str, url: bytes) -> Target | None:
    """None if it is not valid. The host of a whole URL counts for nothing, as the header's: any name leads here."""
    try:
        parts = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return None
    if parts.fragment is not None or parts.userinfo is not None or (url == b"*" and method != "OPTIONS"):
        return None
    if parts.schema is not None:
        host = url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]
        if parts.schema.lower() not in (b"http", b"https") or not host or not _HOST.fullmatch(host):
            return None
    return Target(parts.path or b"/", parts.query or b"")


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))


MOST_PIPELINED = 8
"""Requests that may begin in one slice of bytes."""
_TLS_HANDSHAKE = b"\x16\x03"
_NO_TLS = "it is a TLS handshake, but this port serves plain HTTP; use http://, or TLS in a proxy"
_OTHER_VERSIONS = {"Invalid HTTP version": "This version of HTTP", "Pause on PRI/Upgrade": "HTTP/2"}
"""What httptools says of them, and what they are."""
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class RefusedError(Exception):
    """What arrived is not a valid request, or too large."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class RequestParser:
    """Parses one connection's requests. `on_head` is called when a request's headers are complete, `on_end` when its
    body is. `begin` creates a request cycle; `scope` is common to all of the connection's requests."""

    def __init__(
        self,
        begin: Callable[[], RequestCycle],
        scope: Mapping[str, Any],
        most_head: int,
        on_head: Callable[[RequestCycle], None],
        on_end: Callable[[RequestCycle], None],
    ) -> None:
        self.incoming: RequestCycle | None = None
        """The request being parsed."""
        self._begin = begin
        self._scope = scope
        self._most_head = most_head
        self._on_head = on_head
        self._on_end = on_end
        self._parser = httptools.HttpRequestParser(self)
        self._in_head = True
        self._begun = 0
        """Requests that began in the current slice."""
        self._known_bytes = 0
        """Bytes of complete request lines and headers: exact."""
        self._head_bytes = self._body_bytes = self._framing_bytes = 0
        self._problem: Problem | None = None
        """Why a callback stopped the parser."""
        self._asks_upgrade = False
        """Whether the current request asks for another protocol, which is not supported."""
        self._replays = False
        """Whether a second parser is being told how the body is framed."""

    @property
    def between(self) -> bool:
        """Whether no byte of another request has arrived."""
        return self.incoming is None and not self._head_bytes

    def close(self) -> None:
        """Drop the parser, which refers back to this object: no garbage collection is needed then."""
        self._parser = None  # type: ignore[assignment]

    def feed(self, piece: bytes) -> None:
        """Parse a slice of a few kilobytes. For what the parser buffers, limits are exact to within one slice."""
        was_in_head, was, body_before = self._in_head, self.incoming, self._body_bytes
        self._begun = 0
        try:
            self._parse(piece)
        except httptools.HttpParserCallbackError:
            assert self._problem is not None
            raise RefusedError(self._problem) from None
        except httptools.HttpParserError as error:
            is_tls = was is None and piece.startswith(_TLS_HANDSHAKE)
            raise RefusedError(malformed(_NO_TLS) if is_tls else _problem_of(str(error))) from None
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
        """After a request to upgrade, httptools takes everything that follows for the other protocol. There is none
        here, and what follows is the body: a second parser reads it, after a head that frames the body the same way."""
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
            self._stop(malformed(f"more than {MOST_PIPELINED} pipelined requests"))
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
        if self._in_head:  # otherwise it is a trailer, or a replay
            self._count(len(name) + len(value) + len(b": \r\n"))
            self.incoming.add_header(name, value)

    def on_headers_complete(self) -> None:
        cycle = self.incoming
        assert cycle is not None
        if self._replays:
            self._replays = False
            return
        version = self._parser.get_http_version()
        if problem := problem_of_head(version, cycle.headers):
            self._stop(problem)
        method = self._parser.get_method().decode("ascii")
        target = target_of(method, cycle.url)
        if target is None:
            self._stop(malformed("the request target is not valid"))
        cycle.keep_alive = version == "1.1" and self._parser.should_keep_alive()
        cycle.scope = {
            **self._scope,
            "http_version": version,
            "method": method,
            "path": self._scope["root_path"] + unquote(target.path.decode("ascii")),
            "raw_path": self._scope["root_path"].encode() + target.path,
            "query_string": target.query,
            "headers": cycle.headers,
            "state": self._scope["state"].copy(),
        }
        self._in_head = False
        self._asks_upgrade = self._parser.should_upgrade()
        self._head_bytes = self._body_bytes = self._framing_bytes = 0
        self._on_head(cycle)

    def on_body(self, body: bytes) -> None:
        assert self.incoming is not None
        self._body_bytes += len(body)
        self.incoming.add_body(body)

    def on_message_complete(self) -> None:
        if self._asks_upgrade:
            return  # the parser calls this for every such request, with a body or without
        done, self.incoming = self.incoming, None
        assert done is not None
        self._in_head = True
        self._framing_bytes = 0
        done.end_body()
        self._on_end(done)

    def _count(self, size: int) -> None:
        self._known_bytes += size
        if self._known_bytes > self._most_head:
            self._stop(self._headers_too_large())

    def _stop(self, problem: Problem) -> NoReturn:
        self._problem = problem
        raise ValueError(problem.message)


def _problem_of(error: str) -> Problem:
    version = _OTHER_VERSIONS.get(error)
    return malformed(error) if version is None else other_version(version)
