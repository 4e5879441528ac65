"""Signals to a real server: what ends, what goes on meanwhile, and what is heard."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import time

import httpx
import pytest

from cllm.cli.http_server import Server
from cllm.config import load_config
from cllm.server.http.listening import bind
from server_process import LIMIT_S, Served, completion, read_all, serving, until
from thorough import slow

SLOW = "backend.fake.latency_ms=20"
BODY = {"prompt": "hello", "max_tokens": 2}


def ready(server: Served) -> int:
    return httpx.get(f"{server.url}/ready", timeout=LIMIT_S).status_code


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=slow), pytest.param(signal.SIGINT, marks=slow)]
)
def test_until_the_last_stream_is_done_the_port_answers(number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is switched off here (nohup), and stays so for servers")
    with serving(SLOW, "server.shutdown_grace_s=600") as server, server.connect() as stream:
        stream.sendall(completion(max_tokens=100, stream=True))
        assert stream.recv(1) == b"H"
        assert ready(server) == 200
        server.send(number)
        until(lambda: ready(server) == 503)
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
        assert "cllm:num_requests_running" in httpx.get(f"{server.url}/metrics").text
        refused = httpx.post(f"{server.url}/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) >= 1
        assert server.process.poll() is None
        assert b"data: [DONE]" in read_all(stream)
        assert server.end() == 0
        assert server.logged(f"{number.name}: shutting down; running requests have 600 s")
        assert not server.logged("Traceback")
        with pytest.raises(httpx.ConnectError):
            ready(server)


def test_signals_that_come_at_once_are_one() -> None:
    with serving(SLOW, "server.shutdown_grace_s=600") as server, server.connect() as stream:
        stream.sendall(completion(max_tokens=50, stream=True))
        assert stream.recv(1) == b"H"
        server.send(signal.SIGINT, signal.SIGINT, signal.SIGTERM)
        assert b"data: [DONE]" in read_all(stream)
        assert server.end() == 0
        assert sum("shutting down" in line for line in server.lines) == 1


def test_a_hangup_that_was_switched_off_stays_off() -> None:
    with serving(ignoring=[signal.SIGHUP]) as server:
        server.send(signal.SIGHUP)
        time.sleep(0.3)
        assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 200
        assert ready(server) == 200
        server.send(signal.SIGTERM)
        assert server.end() == 0


def test_an_idle_server_ends_although_clients_keep_their_connections() -> None:
    with serving() as server, httpx.Client() as kept, server.connect():
        assert kept.get(f"{server.url}/health").status_code == 200
        server.send(signal.SIGTERM)
        assert server.end() == 0


def test_a_signal_between_loading_and_listening_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin = Server.startup

    async def interrupted(server: Server, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_soon(server._on_signal, signal.SIGTERM)
        await begin(server, sockets)

    monkeypatch.setattr(Server, "startup", interrupted)
    config = load_config(overrides={"backend.type": "fake", "server.port": 0}).config
    with bind(config.server) as listener:
        server = Server(config, listener)
        with contextlib.suppress(asyncio.CancelledError):
            server.run(sockets=[listener])
    gc.unfreeze()
    assert server.exit_code in (0, 128 + signal.SIGTERM)  # whether or not it listened already
    assert not any("Traceback" in record.getMessage() or record.exc_info for record in caplog.records)
