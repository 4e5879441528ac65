"""What RFC 9112 forbids in the head of a request, as far as httptools lets it through: where a proxy in front reads a
request differently than the server behind it, one client can slip its bytes into another's request."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import httptools

from cllm.server.errors import Problem

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
    """`headers` have lower-case names."""
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
