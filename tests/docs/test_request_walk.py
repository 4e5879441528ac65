"""docs/architecture.md draws the files that a streamed chat request passes: a traced one passes just these, and of the
whole package no more than can be read."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from starlette.types import Message, Scope

from cllm.config import load_config
from cllm.executor import LocalExecutor
from cllm.llm import AsyncLLM
from cllm.server.app import create_app
from repository import ROOT

SOURCE = ROOT / "src" / "cllm"
SECTION = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("\n## The life of a request\n")[1]
DRAWING = SECTION.split("```")[1]
CONNECTION = {f"server/http/{name}.py" for name in ("connection", "connections", "cycle", "parser")}
"""Below ASGI, where this test begins."""
MOST_FILES = 86
"""Files of the package that run for a request, on the event loop and on the engine's thread."""
UPKEEP = ("maintain", "upkeep_at")
BEGUN = 3
"""Writes after which there are only tokens, and the end."""


def drawn(part: str) -> set[str]:
    """Files in a drawing; a name without a directory is in the one before it."""
    found: set[str] = set()
    directory = ""
    for path, name in re.findall(r"((?:\w+/)*)(\w+\.py)?", part):
        directory = path or directory
        if name:
            found.add(name if not path and name in ("llm.py", "generation.py") else directory + name)
    return found


class Trace:
    """Files of the package whose code runs on this thread, except for the cache's upkeep: that belongs to no request,
    and when it has something to do is a matter of time."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._upkeep: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self._upkeep is not None:
            if event == "return" and frame is self._upkeep:
                self._upkeep = None
        elif event == "call" and (path := frame.f_code.co_filename).startswith(str(SOURCE)):
            if frame.f_code.co_name in UPKEEP:
                self._upkeep = frame
            else:
                self.files.add(path.removeprefix(f"{SOURCE}/"))


async def profile_engine(llm: AsyncLLM, trace: Trace | None) -> None:
    """From now on, or no longer."""
    assert isinstance(llm.executor, LocalExecutor) and llm.executor.engine is not None
    await asyncio.wrap_future(llm.executor.engine.call(lambda: sys.setprofile(trace)))


async def stream_chat(app: Callable[..., Any], on_body: Callable[[int], None]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "ignore_eos": True, "stream": True}
    raw, asked, bodies = json.dumps(body).encode(), False, 0

    async def receive() -> Message:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal bodies
        if message["type"] == "http.response.body":
            bodies += 1
            on_body(bodies)

    path = "/v1/chat/completions"
    scope: Scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http"}
    scope |= {"root_path": "", "server": ("here", 80), "client": ("there", 1), "extensions": {"cllm.send": send}}
    await app(scope, receive, send)


async def test_a_chat_request_passes_the_files_that_are_drawn() -> None:
    slow = {"backend.type": "fake", "backend.fake.latency_ms": 5}  # tokens still come when tracing begins
    config = load_config(overrides={"model.name": "tiny", "server.page": False} | slow).config
    llm = AsyncLLM(config)
    whole, tokens, computed = Trace(), Trace(), Trace()

    def on_body(number: int) -> None:
        if number == BEGUN:
            sys.setprofile(tokens)

    async with llm:
        app = create_app(llm, config)
        await stream_chat(app, lambda _: None)  # what is done once is done
        await profile_engine(llm, computed)
        sys.setprofile(whole)
        try:
            await stream_chat(app, on_body)
        finally:
            sys.setprofile(None)
        await profile_engine(llm, None)
    passed = {file for file in whole.files | tokens.files if file.startswith("server/")} | CONNECTION
    assert passed == {file for file in drawn(DRAWING) if file.startswith("server/")}
    assert f"code of {len(passed)} files of `server/`" in SECTION
    back = drawn(DRAWING.split(" back ")[1]) - {"server/openai/logprobs.py"}  # there are none here
    ends = {"server/middleware.py", "served/entries.py"}  # which the end of the response passes
    assert tokens.files - ends == back - CONNECTION
    assert f"that of {len(back)} files on the event loop" in SECTION
    files = whole.files | tokens.files | computed.files | CONNECTION
    assert len(files) <= MOST_FILES, f"{len(files)} files: {sorted(files)}"
