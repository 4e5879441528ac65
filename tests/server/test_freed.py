"""What a request took is free when it has ended, without the garbage collector: that counts objects, not bytes, and
would keep thousands of long prompts."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from fastapi import FastAPI

from cllm.config import Config
from cllm.llm import AsyncLLM
from cllm.server.app import create_app
from event_loop import post

TEXT = "5" * 1500
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 3}
SETTINGS = Config.model_validate(
    {
        "backend": {"type": "fake"},
        "resources": {"max_context_length": 4096},
        "scheduler": {"max_queue": 2},
        "log": {"level": "error"},
    }
)


def completion(**body: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": TEXT, "max_tokens": 3, **body}


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
CASES: dict[str, tuple[int, tuple[str, dict[str, Any]]]] = {
    "plain": (200, completion()),
    "stream": (200, completion(stream=True)),
    "answers": (200, completion(n=3)),
    "streamed answers": (200, completion(n=3, stream=True)),
    "logprobs": (200, completion(logprobs=3, echo=True)),
    "prompt_logprobs": (200, completion(prompt_logprobs=2)),
    "chat": (200, ("/v1/chat/completions", CHAT)),
    "streamed chat": (200, ("/v1/chat/completions", {**CHAT, "stream": True})),
    "schema": (200, ("/v1/chat/completions", {**CHAT, "response_format": SCHEMA})),
    "messages": (200, ("/v1/messages", CHAT)),
    "responses": (200, ("/v1/responses", {"input": TEXT, "max_output_tokens": 16, "store": False})),
    "embedding": (200, ("/v1/embeddings", {"input": TEXT})),
    "malformed": (400, completion(max_tokens=-1)),
    "too long": (400, completion(prompt=TEXT * 10)),
    "late": (408, completion(timeout=0.001, max_tokens=2000)),
    "too many": (429, completion(prompt=[TEXT] * 8)),
}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def app(loop: asyncio.AbstractEventLoop) -> Iterator[FastAPI]:
    llm = AsyncLLM(SETTINGS)
    app = create_app(llm, SETTINGS)
    loop.run_until_complete(llm.start())
    yield app
    loop.run_until_complete(llm.shutdown(0))


async def left(app: FastAPI, path: str, body: bytes) -> None:
    """A client that goes away while its answer is computed."""
    task = asyncio.ensure_future(post(app, path, body))
    await asyncio.sleep(0.02)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def until_idle(app: FastAPI) -> None:
    """The engine's thread and the loop have let go of the last request."""
    while json.loads((await get_kv(app)).body)["running"]:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)


async def get_kv(app: FastAPI) -> Any:
    return await post(app, "/kv", b"", method="GET")


def cycles(loop: asyncio.AbstractEventLoop, app: FastAPI, work: Any) -> Counter[str]:
    """The types of what only the garbage collector would free after this."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        loop.run_until_complete(work())
        loop.run_until_complete(until_idle(app))
        gc.collect()
        return Counter(type(each).__name__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("case", CASES)
def test_an_ended_request_leaves_no_cycles(loop: asyncio.AbstractEventLoop, app: FastAPI, case: str) -> None:
    status, (path, body) = CASES[case]
    raw = json.dumps(body).encode()
    loop.run_until_complete(post(app, path, raw))  # the first one compiles, imports, fills caches

    async def ask() -> None:
        assert (await post(app, path, raw)).status == status

    assert not cycles(loop, app, ask)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_client_left_leaves_no_requests(
    loop: asyncio.AbstractEventLoop, app: FastAPI, stream: bool
) -> None:
    path, body = completion(max_tokens=2000, ignore_eos=True, stream=stream)
    raw = json.dumps(body).encode()
    found = cycles(loop, app, lambda: left(app, path, raw))
    assert not {"Request", "Sequence", "Generation", "RequestCycle"} & found.keys(), found
