"""What RFC 9112 forbids, over raw sockets: refused, and nothing behind it on the connection is taken for a request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server_process import Served, read_all, reply_of, serving

HOST = b"host: test\r\n"
GET = b"GET /health HTTP/1.1\r\n"
POST = b"POST /encode HTTP/1.1\r\ncontent-type: application/json\r\n" + HOST
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
BODY = b"d\r\n" + b'{"text": "a"}' + b"\r\n0\r\n\r\n"
ONE_CHUNK = b'{"text": "a"}\r\n0\r\n\r\n'
BEHIND = b"GET /behind HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served
        assert not served.logged("Traceback"), served.lines


def ask(server: Served, raw: bytes) -> bytes:
    with server.connect() as connection:
        connection.sendall(raw)
        return read_all(connection)


MALFORMED = {
    "no host": GET + b"\r\n",
    "two hosts": GET + HOST + HOST + b"\r\n",
    "two different hosts": GET + HOST + b"host: other\r\n\r\n",
    "two hosts, HTTP/1.0": b"GET /health HTTP/1.0\r\n" + HOST + HOST + b"\r\n",
    "a blank in the host": GET + b"host: a b\r\n\r\n",
    "two hosts in one line": GET + b"host: a, b\r\n\r\n",
    "a path in the host": GET + b"host: a/b\r\n\r\n",
    "a user in the host": GET + b"host: me@a\r\n\r\n",
    "a port that is no number": GET + b"host: a:8x\r\n\r\n",
    "an open bracket in the host": GET + b"host: [::1\r\n\r\n",
    "other letters in the host": GET + "host: ä\r\n\r\n".encode(),
    "a fragment": b"GET /health#a HTTP/1.1\r\n" + HOST + b"\r\n",
    "a user in the target": b"GET http://me@test/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "another scheme": b"GET ftp://test/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "a bad host in the target": b"GET http://a_(%zz)/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "a star": b"GET * HTTP/1.1\r\n" + HOST + b"\r\n",
    "a tunnel": b"CONNECT test:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "length and chunks": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + BODY,
    "chunks and length": POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n" + BODY,
    "two lengths": POST + b"content-length: 13\r\ncontent-length: 14\r\n\r\n" + ONE_CHUNK,
    "one length twice": POST + b"content-length: 13\r\ncontent-length: 13\r\n\r\n" + ONE_CHUNK,
    "a list of lengths": POST + b"content-length: 13, 13\r\n\r\n" + ONE_CHUNK,
    "a signed length": POST + b"content-length: +13\r\n\r\n" + ONE_CHUNK,
    "a hexadecimal length": POST + b"content-length: 0xd\r\n\r\n" + ONE_CHUNK,
    "no length": POST + b"content-length:\r\n\r\n" + ONE_CHUNK,
    "too large a length": POST + b"content-length: 18446744073709551629\r\n\r\n" + ONE_CHUNK,
    "a blank before the colon": POST + b"content-length : 13\r\n\r\n" + ONE_CHUNK,
    "a tab before the colon": POST + b"transfer-encoding\t: chunked\r\n\r\n" + BODY,
    "a folded line": POST + b"x-a: b\r\n c\r\n\r\n",
    "a folded coding": POST + b"transfer-encoding:\r\n chunked\r\n\r\n" + BODY,
    "a blank before the first header": GET + b" " + HOST + b"\r\n",
    "a carriage return in a value": POST + b"x-a: b\rtransfer-encoding: chunked\r\n\r\n" + BODY,
    "lines without carriage return": b"GET /health HTTP/1.1\nhost: test\n\n",
    "a zero byte in a value": POST + b"x-a: b\0c\r\n\r\n",
    "a line that is no header": POST + b"x-a\r\n\r\n",
    "chunks and more after them": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n" + BODY,
    "chunks twice": POST + b"transfer-encoding: chunked, chunked\r\n\r\n" + BODY,
    "chunks in HTTP/1.0": b"POST /encode HTTP/1.0\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n" + BODY,
}
BAD_CHUNKS = {
    "a signed size": b"+d\r\n" + ONE_CHUNK,
    "a negative size": b"-d\r\n" + ONE_CHUNK,
    "a prefix": b"0xd\r\n" + ONE_CHUNK,
    "a blank before the size": b" d\r\n" + ONE_CHUNK,
    "a blank after the size": b"d \r\n" + ONE_CHUNK,
    "no size": b"\r\n" + ONE_CHUNK,
    "too large a size": b"1000000000000000d\r\n" + ONE_CHUNK,
    "a size without carriage return": b"d\n" + ONE_CHUNK,
    "an extension without carriage return": b"d;a\n" + ONE_CHUNK,
    "a carriage return in an extension": b"d;a\rb\r\n" + ONE_CHUNK,
    "more than its size": b"c\r\n" + ONE_CHUNK,
    "no end of line": b'd\r\n{"text": "a"}0\r\n\r\n',
    "a length behind the body": BODY[:-2] + b"content-length: 5\r\n\r\n",
    "a coding behind the body": BODY[:-2] + b"transfer-encoding: chunked\r\n\r\n",
}
NOT_SUPPORTED = {
    b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n": 505,
    b"GET /health HTTP/1.2\r\n" + HOST + b"\r\n": 505,
    b"GET /health HTTP/0.9\r\n" + HOST + b"\r\n": 505,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": 505,
    **{
        POST + b"transfer-encoding: " + coding + b"\r\n\r\n" + BODY: 501
        for coding in (b"gzip, chunked", b"identity, chunked", b"identity\r\ntransfer-encoding: chunked", b"gzip")
    },
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_head_ends_the_connection(server: Served, case: str) -> None:
    answers = ask(server, MALFORMED[case] + BEHIND)
    reply = reply_of(answers)
    assert reply.status == 400, answers
    assert reply.headers["connection"] == "close" and answers.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("case", BAD_CHUNKS)
def test_malformed_chunks_end_the_connection(server: Served, case: str) -> None:
    answers = ask(server, CHUNKED + BAD_CHUNKS[case] + BEHIND)
    assert reply_of(answers).status == 400 and answers.count(b"HTTP/1.1 ") == 1, answers


@pytest.mark.parametrize("raw", NOT_SUPPORTED)
def test_what_is_not_supported_is_refused_by_name(server: Served, raw: bytes) -> None:
    answers = ask(server, raw + BEHIND)
    reply = reply_of(answers)
    assert reply.status == NOT_SUPPORTED[raw], answers
    assert "use HTTP/1.1" in reply.error["message"] or "use chunked" in reply.error["message"]
    assert reply.headers["connection"] == "close" and answers.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("host", [b"test", b"test:", b"test:8000", b"127.0.0.1:80", b"[::1]:80", b"a_b.c-d", b""])
def test_usual_hosts_are_taken(server: Served, host: bytes) -> None:
    assert reply_of(ask(server, GET + b"host: " + host + b"\r\nconnection: close\r\n\r\n")).status == 200


def test_a_whole_url_is_taken(server: Served) -> None:
    for target, status in ((b"http://test/health", 200), (b"HTTP://other:80/health?a=b", 200), (b"http://test", 200)):
        raw = b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n"
        assert reply_of(ask(server, raw)).status == status, target


def test_chunks_as_they_should_be_are_read(server: Served) -> None:
    for coding in (b"chunked", b"Chunked"):
        head = POST + b"transfer-encoding: " + coding + b"\r\n\r\n"
        answers = ask(server, head + b"00d;a=b\r\n" + ONE_CHUNK + BEHIND)
        assert reply_of(answers).status == 200 and b"/behind" in answers, answers


def test_http_1_0_needs_no_host(server: Served) -> None:
    assert reply_of(ask(server, b"GET /health HTTP/1.0\r\n\r\n")).status == 200
