"""A real `cllm serve`, on the fake backend unless told otherwise, and raw sockets to be unkind to it with.

It is forked from a process that has imported everything (fork_server.py); the tests of tests/cli start the command.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from fork_server import Forked, fork_server

LIMIT_S = 60.0
"""A guard against hanging, not a demand on speed."""


class Served:
    """The process, where it answers, and what it has logged so far."""

    def __init__(self, process: Forked) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        line = process.stdout.readline()
        found = re.search(r"http://([\d.]+):(\d+)", line)
        if not found:
            self._reader.join(LIMIT_S)  # it says why
        assert found, f"not ready: {line!r} {self.lines}"
        self.url = found[0]
        self.address = (found[1], int(found[2]))

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)

    def logged(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=LIMIT_S)

    def send(self, *signals: signal.Signals) -> None:
        for number in signals:
            self.process.send_signal(number)

    def end(self) -> int:
        """The exit code; nothing may have gone wrong on the way."""
        code = self.process.wait(timeout=LIMIT_S)
        self._reader.join(LIMIT_S)
        return code

    def idle(self) -> bool:
        kv = httpx.get(f"{self.url}/kv").json()
        return bool(kv["running"] == kv["waiting"] == kv["referenced"] == 0)

    def running(self) -> int:
        running: int = httpx.get(f"{self.url}/kv").json()["running"]
        return running


@contextmanager
def serving(
    *settings: str,
    files: int | None = None,
    ignoring: Sequence[signal.Signals] = (),
    backend: str = "fake",
    model: str | None = None,
) -> Iterator[Served]:
    """`files`: most open files; `ignoring`: signals that are switched off where the server starts; `model`: a real one
    instead of the fake one, on the backend that it gets by itself."""
    what = ["--backend", backend] if model is None else [model]
    arguments = ["serve", *what, "--port", "0"]
    for setting in settings:
        arguments += ["--set", setting]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CLLM_")}
    environment["CLLM_KV__DISK__ENABLED"] = "false"  # a setting says otherwise where it is wanted
    if model is not None and (cache := os.environ.get("CLLM_CACHE_DIR")):
        environment["CLLM_CACHE_DIR"] = cache
    with fork_server.start(arguments, environment, files=files, ignoring=ignoring) as process:
        try:
            yield Served(process)
        finally:
            process.kill()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.02)


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    pieces = []
    try:
        while piece := connection.recv(65_536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def reply_of(raw: bytes) -> Reply:
    """The one answer in `raw`; its body as it stands there, in chunks or not."""
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert re.match(r"HTTP/1\.1 \d{3} ", first), raw[:200]
    return Reply(int(first.split()[1]), headers, body)


def post(path: str, body: dict[str, Any], *headers: str, version: str = "1.1") -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "host: test", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content


def completion(**body: Any) -> bytes:
    return post("/v1/completions", {"prompt": "hello", "ignore_eos": True, **body})
