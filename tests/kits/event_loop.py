"""Requests straight into the app, without a network, while every callback of the event loop is timed."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.types import Message

from cllm.server.http.cycle import WHEN_GONE


class Reply(NamedTuple):
    status: int
    body: bytes
    writes: int


async def post(
    app: FastAPI, path: str, body: bytes, gone: asyncio.Future[None] | None = None, *, method: str = "POST"
) -> Reply:
    """What the app answers to a body that comes as a network would bring it. `gone`: done when the client leaves."""
    waiting = [body[start : start + 65_536] for start in range(0, len(body), 65_536)] or [b""]
    waiting.reverse()
    status, pieces = 0, []

    async def receive() -> Message:
        if not waiting:
            await (asyncio.Event().wait() if gone is None else asyncio.shield(gone))
            return {"type": "http.disconnect"}
        piece = waiting.pop()
        return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "state": {},
        "extensions": {} if gone is None else {WHEN_GONE: gone},
    }
    await app(scope, receive, send)
    return Reply(status, b"".join(pieces), len(pieces))


class LoopTimes:
    """The longest callback so far, in seconds of CPU time: what others do to this machine does not count."""

    def __init__(self) -> None:
        self.worst = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Without the garbage collector: its time depends on everything else that lives in the test's process. The
        server keeps its own out of it (gc.freeze)."""
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            started = time.thread_time()
            try:
                run(handle)
            finally:
                self.worst = max(self.worst, time.thread_time() - started)

        gc.disable()
        asyncio.Handle._run = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]
            gc.enable()
