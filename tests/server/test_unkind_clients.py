"""Clients that send too much, too slowly or by halves, against a real server: limits, answers, nothing left."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import httpx
import psutil
import pytest

from cllm.config import Config
from cllm.errors import ConfigError
from cllm.server.errors import Problem
from cllm.server.http import connection as one_connection
from cllm.server.http import connections
from cllm.server.http.connections import Connections
from server_process import LIMIT_S, Served, completion, post, read_all, reply_of, serving, until
from thorough import slow

SHORT = ["server.header_timeout_s=0.5", "server.body_timeout_s=0.5", "server.write_timeout_s=0.5"]
GET = b"GET /health HTTP/1.1\r\nhost: test\r\n"
LAST = GET + b"connection: close\r\n\r\n"
CHUNKED = (
    b"POST /generate HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Time-outs as they are by default: none of these tests waits for one."""
    with serving("backend.fake.latency_ms=5") as served:
        yield served
        assert not served.logged("Traceback"), served.lines


@pytest.fixture(scope="module")
def impatient() -> Iterator[Served]:
    with serving(*SHORT) as served:
        yield served
        assert not served.logged("Traceback"), served.lines


def ask(server: Served, *pieces: bytes) -> bytes:
    with server.connect() as connection:
        for piece in pieces:
            connection.sendall(piece)
        return read_all(connection)


# -- too much ------------------------------------------------------------------------------------------------------

ENDLESS = {
    "one giant header": (GET + b"x-a: ", b"a" * 65_536),
    "many small headers": (GET, b"a:b\r\n" * 13_000),
    "no end of the request line": (b"GET /", b"a" * 65_536),
    "blank lines": (b"", b"\r\n" * 32_768),
    "a giant name": (GET, b"a" * 65_536),
    "chunk extensions": (CHUNKED + b"1;", b"a" * 65_536),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\n", b"a: b\r\n" * 11_000),
    "chunks of one byte": (CHUNKED, b"1\r\n \r\n" * 11_000),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_what_has_no_end_is_refused_and_not_kept(server: Served, case: str) -> None:
    begin, block = ENDLESS[case]
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    with server.connect() as connection:
        connection.sendall(begin)
        for _ in range(400):  # 25 MB, of which the server may keep 64 KiB
            connection.sendall(block)
        grown = process.memory_info().rss - before
        reply = reply_of(read_all(connection))
    assert (reply.status, reply.error["code"]) == (431, "headers_too_large")
    assert "65536 bytes (server.max_header_bytes)" in reply.error["message"]
    assert reply.headers["connection"] == "close" and int(reply.headers["content-length"]) == len(reply.body)
    assert grown < 20_000_000


def test_headers_up_to_the_limit_are_taken(server: Served) -> None:
    for size, status in ((60_000, 200), (65_536, 431)):
        raw = ask(server, GET + b"connection: close\r\nx-a: " + b"a" * size + b"\r\n\r\n")
        assert reply_of(raw).status == status


def test_pipelined_requests_are_answered_in_order_up_to_a_number(server: Served) -> None:
    one = GET + b"\r\n"
    answers = ask(server, completion(max_tokens=3) + one + one + LAST)
    assert answers.count(b"HTTP/1.1 200 OK") == 4 and answers.index(b'"usage"') < answers.index(b'"model_loaded"')
    # More than anybody needs: the first are answered, then the connection ends and the rest may be sent again.
    one = "GET /no{} HTTP/1.1\r\nhost: test\r\n\r\n"
    for number in (9, 12, 20_000):
        answers = ask(server, "".join(map(one.format, range(number))).encode())
        assert re.findall(rb"Unknown endpoint: /no(\d+)\.", answers) == [b"%d" % each for each in range(8)]
        assert answers.count(b"HTTP/1.1 404") == 8 and answers.count(b"connection: close") == 1
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_requests_before_one_that_is_malformed_are_answered(server: Served) -> None:
    answers = ask(server, completion(max_tokens=3) + GET + b"\r\n" + b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    assert answers.count(b"HTTP/1.1 200 OK") == 2 and b'"model_loaded"' in answers


def test_what_is_no_http_is_refused_with_a_reason(server: Served) -> None:
    for raw in (
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"GET  HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/3\r\n",
    ):
        reply = reply_of(ask(server, raw))
        assert (reply.status, reply.error["code"]) == (400, "bad_request"), raw
        assert reply.error["message"].startswith("Malformed HTTP request: ") and reply.headers["x-request-id"]


def test_what_is_no_request_yet_is_logged_too(server: Served) -> None:
    def shake_hands() -> None:
        with server.connect() as connection, pytest.raises(ssl.SSLError):
            ssl.create_default_context().wrap_socket(connection, server_hostname="localhost")

    def logged(refuse: Callable[[], object], line: str) -> bool:
        """Again and again: of many refusals in a second, not all are logged."""
        refuse()
        return server.logged(f" for a request from 127.0.0.1: {line}")

    until(
        partial(logged, shake_hands, "Malformed HTTP request: it is a TLS handshake, but this port serves plain HTTP;")
    )
    endless = partial(ask, server, GET + b"x-a: " + b"a" * 65_536)
    until(partial(logged, endless, "The request line and headers are larger than 65536 bytes"))


def test_a_large_body_is_refused_while_it_is_being_sent(server: Served) -> None:
    head = b"POST /generate HTTP/1.1\r\nhost: test\r\ncontent-length: 50000000\r\n\r\n"
    reply = reply_of(ask(server, head, *[b"x" * 1_000_000] * 20))
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


def unfinished(size: int) -> bytes:
    """All but one byte of a body of this size, and before it the headers."""
    head = f"POST /generate HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    return head.encode() + b'{"prompt": "' + b"x" * (size - 14) + b'"'


def send_what_is_taken(connections: list[socket.socket], data: bytes) -> None:
    """To all of them at once, until none takes any more."""
    left = dict.fromkeys(connections, memoryview(data))
    while left:
        _, writable, _ = select.select([], list(left), [], 1.0)
        if not writable:
            return
        for connection in writable:
            connection.setblocking(False)
            left[connection] = left[connection][connection.send(left[connection]) :]
            connection.settimeout(LIMIT_S)
            if not left[connection]:
                del left[connection]


def test_all_bodies_together_have_a_limit_and_each_has_its_turn(server: Served) -> None:
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    with contextlib.ExitStack() as stack:
        senders = [stack.enter_context(server.connect()) for _ in range(80)]
        send_what_is_taken(senders, unfinished(4_100_000))
        assert process.memory_info().rss - before < 130_000_000  # 328 MB were sent; 64 MiB and one body may be held
        assert httpx.get(f"{server.url}/health").status_code == 200
        raw = ask(server, completion(max_tokens=3).replace(b"host: test", b"host: test\r\nconnection: close"))
        assert reply_of(raw).status == 200  # small ones do not wait


def test_bodies_that_had_to_wait_are_answered_when_others_are_done() -> None:
    body = unfinished(1_500_000)
    settings = ["server.max_body_bytes=2000000", "server.max_bodies_bytes=2000000"]
    with serving(*settings) as server, contextlib.ExitStack() as stack:
        senders = [stack.enter_context(server.connect()) for _ in range(3)]
        for sender in senders:
            sender.sendall(body[:700_000])
        rest = [threading.Thread(target=sender.sendall, args=(body[700_000:] + b"}",)) for sender in senders]
        for thread in reversed(rest):
            thread.start()
        for sender in senders:
            assert b"the prompt" in sender.recv(65_536)
        for thread in rest:
            thread.join()


def test_who_was_kept_waiting_is_not_blamed() -> None:
    settings = ["server.max_body_bytes=2000000", "server.max_bodies_bytes=2000000", "server.body_timeout_s=2"]
    with serving(*settings) as server, server.connect() as first, server.connect() as second:
        send_what_is_taken([first], unfinished(1_900_000))
        send_what_is_taken([second], unfinished(1_900_000)[:500_000])
        blamed, other = reply_of(read_all(first)), reply_of(read_all(second))
    assert (blamed.status, blamed.error["code"]) == (408, "slow_request")
    assert (other.status, other.error["code"]) == (503, "too_many_bodies") and other.headers["retry-after"] == "1"


# -- too slowly, or not at all -------------------------------------------------------------------------------------


def test_a_client_that_says_nothing_is_left(impatient: Served) -> None:
    with impatient.connect() as connection:
        assert connection.recv(1) == b""


def test_headers_that_trickle_in_are_refused(impatient: Served) -> None:
    with impatient.connect() as connection:
        with contextlib.suppress(ConnectionError):
            for byte in GET * 100:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
                if impatient_answer(connection):
                    break
        reply = reply_of(read_all(connection))
    assert (reply.status, reply.error["code"]) == (408, "slow_request")
    assert "headers did not arrive within 0.5 s (server.header_timeout_s)" in reply.error["message"]


def impatient_answer(connection: socket.socket) -> bool:
    """Whether there is something to read."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(LIMIT_S)


def test_a_second_request_has_its_own_time(impatient: Served) -> None:
    with impatient.connect() as connection:
        connection.sendall(GET + b"\r\n")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        time.sleep(0.8)  # idle connections are kept for longer than headers may take
        connection.sendall(GET)
        reply = reply_of(read_all(connection))
    assert reply.status == 408


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/nothing", "/health"])
def test_bodies_that_never_end_are_refused(impatient: Served, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\nx-request-id: mine\r\n"
    reply = reply_of(ask(impatient, head.encode() + b"content-length: 1000\r\n\r\n{"))
    assert reply.headers["x-request-id"] == "mine"
    if path in ("/v1/completions", "/generate"):
        assert ("success" in json.loads(reply.body)) == (path == "/generate")
        assert (reply.status, reply.error["code"]) == (408, "slow_request")
        assert "body did not arrive within 0.5 s (server.body_timeout_s)" in reply.error["message"]
    else:  # answered at once, and the connection is not kept for the rest of the body
        assert reply.status in (404, 405)


def test_a_client_that_does_not_read_its_answer_is_cut_off() -> None:
    with serving(*SHORT, "resources.kv_cache_max_memory_mb=64") as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        connection.sendall(completion(max_tokens=4000, n=32, logprobs=5, stream=True))
        until(lambda: server.logged("disconnected a client that read too slowly for 0.5 s (server.write_timeout_s)"))
        until(server.idle)
        assert not server.logged("Traceback"), server.lines


# -- too many ------------------------------------------------------------------------------------------------------


def test_silent_connections_make_room_for_others() -> None:
    with serving("server.max_connections=8") as server, contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(server.connect()).sendall(b"G")
        assert httpx.get(f"{server.url}/health").status_code == 200
        metrics = httpx.get(f"{server.url}/metrics").text
        (shed,) = [
            line for line in metrics.splitlines() if line.startswith('cllm:http_connections_cut_total{reason="shed"}')
        ]
        assert float(shed.split()[1]) >= 32
        assert "\ncllm:http_connections 8.0" in metrics
        until(lambda: server.logged("all 8 connections are in use (server.max_connections)"))
        assert sum("connections are in use" in line for line in server.lines) == 1


def test_slow_bodies_make_room_too_and_running_answers_do_not() -> None:
    settings = ["server.max_connections=4", "backend.fake.latency_ms=20"]
    with serving(*settings) as server, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(server.connect()) for _ in range(3)]
        for stream in streams:
            stream.sendall(completion(max_tokens=4000, stream=True))
            assert stream.recv(65_536).startswith(b"HTTP/1.1 200")
        slow = stack.enter_context(server.connect())
        head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        slow.sendall(head + b"content-length: 9\r\n\r\n{")
        time.sleep(0.5)  # what it has sent must have been read, or it counts as one that says nothing
        last = stack.enter_context(server.connect())
        last.sendall(completion(max_tokens=4000, stream=True))
        assert last.recv(65_536).startswith(b"HTTP/1.1 200")
        shed = reply_of(read_all(slow))
        assert shed.error["code"] == "too_many_connections" and "to make room" in shed.error["message"]
        refused = reply_of(ask(server, GET + b"\r\n"))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "All 4 connections are in use (server.max_connections)" in refused.error["message"]
        for stream in (*streams, last):
            assert b"data: " in stream.recv(65_536)


@slow
def test_few_file_descriptors_are_enough() -> None:
    with serving("server.header_timeout_s=3", files=64) as server, contextlib.ExitStack() as stack:
        until(lambda: server.logged("the open-file limit allows only"))
        for _ in range(100):
            stack.enter_context(server.connect())
        for _ in range(3):
            assert httpx.get(f"{server.url}/health", timeout=LIMIT_S).status_code == 200
        assert not server.logged("Traceback"), server.lines


class Limits:
    """Stands for the process's limit of open files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, *, may_raise: bool = True) -> None:
        self.now = (soft, hard)
        self.may_raise = may_raise
        monkeypatch.setattr(resource, "getrlimit", lambda _: self.now)
        monkeypatch.setattr(resource, "setrlimit", self.set)
        monkeypatch.setattr(connections, "_open_files", lambda: 20)

    def set(self, _: int, limits: tuple[int, int]) -> None:
        if not self.may_raise:
            raise ValueError("not allowed to raise maximum limit")
        self.now = limits


def test_the_limit_of_open_files_is_raised_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(monkeypatch, 1024, 500_000)
    assert connections.room_for(1024) == (1024, connections.BACKLOG)
    assert 1024 + connections.BACKLOG < limits.now[0] < 5_000
    Limits(monkeypatch, 1024, 4096, may_raise=False)
    most, backlog = connections.room_for(1024)
    assert most < 1024 and most + backlog + 20 + connections.SPARE_FILES <= 1024
    Limits(monkeypatch, 30, 30)
    assert min(connections.room_for(1024)) >= 1
    Limits(monkeypatch, 28, 28)
    with pytest.raises(ConfigError, match=r"limit on open files is 28 \(ulimit -n\); a server needs at least 29"):
        connections.room_for(1024)
    Limits(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert connections.room_for(1024) == (1024, connections.BACKLOG)


class Stub:
    def __init__(self) -> None:
        self.told: list[object] = []

    def shed(self) -> None:
        self.told.append("shed")

    def refuse(self, problem: Problem) -> None:
        self.told.append(problem.status)

    def pause_reading(self) -> None:
        self.told.append("pause")

    def resume_reading(self) -> None:
        self.told.append("resume")


def test_the_longest_silent_goes_first() -> None:
    held = Connections(Config().server, most=3)
    new, idle, sending, busy = Stub(), Stub(), Stub(), Stub()
    for member in (busy, sending, idle):
        held.silent(member)
        held.opened(member)
    held.busy(busy)
    held.sending(sending)
    victims = []
    for _ in range(3):
        held.silent(new)
        held.opened(new)
        victims.append([[*member.told] for member in (idle, sending, busy, new)])
        held.busy(new)
    assert victims[0] == [["shed"], [], [], []]
    assert victims[1] == [["shed"], ["shed"], [], []]
    assert victims[2] == [["shed"], ["shed"], [], [503]]


def test_the_newest_bodies_wait_and_one_always_goes_on() -> None:
    held = Connections(Config.model_validate({"server": {"max_body_bytes": 1024, "max_bodies_bytes": 2048}}).server)
    first, second, third, late = members = [Stub() for _ in range(4)]

    def told() -> list[list[object]]:
        news = [[*member.told] for member in members]
        for member in members:
            member.told.clear()
        return news

    for member in (first, second, third):
        held.sending(member)
        held.holds(member, 600)
    assert told() == [[], [], [], []]
    held.holds(second, 900)
    assert told() == [[], ["pause"], ["pause"], []]
    held.holds(first, 1024)  # the oldest always may
    held.sending(late)
    held.holds(late, 400)  # it came with its headers
    assert told() == [[], [], [], ["pause"]]
    held.holds(late, 900)
    assert told() == [[], [], [], [503]]
    held.busy(late)  # which is what it does then
    assert told() == [[], [], [], ["resume"]]
    held.busy(first)
    assert told() == [[], ["resume"], [], []]  # there is room for what one of them may bring
    held.closed(second)
    assert told() == [[], [], ["resume"], []]


# -- by halves, and gone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_two_pipelined_requests_of_a_client_that_leaves_are_ended(server: Served, stream: bool) -> None:
    with server.connect() as connection:
        connection.sendall(completion(max_tokens=4000, stream=stream) * 2)
        until(lambda: server.running() > 0)
    until(server.idle)


def test_a_pipelined_request_too_large_to_keep_does_not_hide_that_its_client_left(server: Served) -> None:
    with server.connect() as connection:
        connection.sendall(completion(max_tokens=4000))
        until(lambda: server.running() > 0)
        connection.sendall(post("/v1/completions", {"prompt": "x" * 500_000}))
    until(server.idle)


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_request_is_answered_in_full(server: Served, stream: bool) -> None:
    with server.connect() as connection:
        connection.sendall(completion(max_tokens=150, stream=stream))  # long enough for several looks at the client
        connection.shutdown(socket.SHUT_WR)
        raw = read_all(connection)
    assert reply_of(raw).status == 200
    answer = httpx.Response(200, content=dechunked(raw))
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n") and answer.text.count("data: ") > 100
    else:
        assert answer.json()["usage"]["completion_tokens"] == 150


def dechunked(raw: bytes) -> bytes:
    reply = reply_of(raw)
    if "content-length" in reply.headers:
        assert len(reply.body) == int(reply.headers["content-length"])
        return reply.body
    body, rest = b"", reply.body
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16) == 0:
            assert rest == b"\r\n"
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


def test_half_closed_pipelined_requests_are_all_answered(server: Served) -> None:
    with server.connect() as connection:
        connection.sendall(completion(max_tokens=20) + GET + b"\r\n")
        connection.shutdown(socket.SHUT_WR)
        raw = read_all(connection)
    assert raw.count(b"HTTP/1.1 200 OK\r\n") == 2


def test_half_a_request_and_no_more_is_dropped(server: Served) -> None:
    with server.connect() as connection:
        connection.sendall(completion(max_tokens=5)[:-3])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_half_closes_and_then_leaves_is_noticed(server: Served, stream: bool) -> None:
    with server.connect() as connection:
        connection.sendall(completion(max_tokens=4000, stream=stream))
        connection.shutdown(socket.SHUT_WR)
        until(lambda: server.running() > 0)
        assert not server.idle()
    until(server.idle)


def test_whether_a_half_closed_client_is_still_there_is_asked_for_as_long_as_a_request_may_take() -> None:
    looks = len(one_connection.STATUS_LINE_BEGIN)
    last_after_s = sum(one_connection.PROBE_S * one_connection.PROBE_GROWTH**look for look in range(looks - 1))
    assert last_after_s > Config().scheduler.request_timeout_s


# -- old and odd, but right ----------------------------------------------------------------------------------------


def test_an_http_1_0_stream_is_sent_plainly_and_ends_with_the_connection(server: Served) -> None:
    raw = ask(server, post("/v1/completions", {"prompt": "hello", "max_tokens": 5, "stream": True}, version="1.0"))
    reply = reply_of(raw)
    assert reply.status == 200 and "transfer-encoding" not in reply.headers
    assert reply.headers["connection"] == "close"
    assert reply.body.startswith(b"data: {") and reply.body.endswith(b"data: [DONE]\n\n")


def test_a_slash_too_many_leads_nowhere(server: Served) -> None:
    for path in ("/health/", "/v1/models/"):
        raw = ask(server, f"GET {path} HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n".encode())
        assert reply_of(raw).status == 404 and b"evil" not in raw


def test_a_body_waits_for_100_continue(server: Served) -> None:
    head, _, body = post("/v1/completions", {"prompt": "hi"}, "expect: 100-continue", "connection: close").partition(
        b"\r\n\r\n"
    )
    with server.connect() as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(65_536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert reply_of(read_all(connection)).status == 200


def test_a_chunked_body_is_read(server: Served) -> None:
    body = b'{"prompt": "hi"}'
    chunks = b"".join(b"%x;note=1\r\n%b\r\n" % (len(part), part) for part in (body[:5], body[5:]))
    head = CHUNKED.replace(b"host: test", b"host: test\r\nconnection: close")
    reply = reply_of(ask(server, head + chunks + b"0\r\nx-trailer: 1\r\n\r\n"))
    assert reply.status == 200 and json.loads(reply.body)["success"]


def test_head_and_upgrades_are_answered_like_any_other(server: Served) -> None:
    for path, status in ((b"/", 200), (b"/health", 200), (b"/metrics", 200), (b"/kv", 405)):
        raw = ask(server, b"HEAD %b HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n" % path)
        assert reply_of(raw).status == status and reply_of(raw).body == b""
    raw = ask(server, GET + b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n")
    assert reply_of(raw).status == 200 and reply_of(raw).headers["connection"] == "close"


@pytest.mark.parametrize("size", [7, 40_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_that_asks_for_http_2_keeps_its_body_and_its_connection(
    server: Served, size: int, chunked: bool
) -> None:
    asks = ["connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__"]
    request = post("/encode", {"text": "x" * size}, *asks)
    if chunked:
        head, _, body = request.partition(b"\r\n\r\n")
        head = re.sub(rb"content-length: \d+", b"transfer-encoding: chunked", head)
        request = b"%b\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (head, len(body), body)
    answers = ask(server, request + GET + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n" + request + LAST)
    assert answers.count(b"HTTP/1.1 200 OK") == 4, answers
    assert answers.count(b'"success":true') == 2 and answers.count(b'"model_loaded"') == 2


def test_one_connection_serves_many_requests(server: Served) -> None:
    with server.connect() as connection:
        for _ in range(5):
            connection.sendall(completion(max_tokens=2))
            raw = b""
            while b'"usage"' not in raw:
                raw += connection.recv(65_536)
            reply = reply_of(raw)
            assert reply.status == 200 and "connection" not in reply.headers
