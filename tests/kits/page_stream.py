"""Reads the page's stream as the page does, and keeps what it says."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from cllm.config import Config
from cllm.llm import AsyncLLM
from http_kit import TrackedApp, served

LIMIT_S = 60.0


class Reader:
    """What somebody knows who has read all events so far."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.versions: list[int] = []
        self.known: dict[str, Any] = {}
        self.codes: NDArray[np.int32] = np.zeros(0, np.int32)

    def take(self, kind: str, event: Mapping[str, Any]) -> None:
        self.kinds.append(kind)
        self.versions.append(event["version"])
        if kind == "whole":
            self.known = {}
            self.codes = np.full(event["cells"], -1, np.int32)
        self.known |= event
        if cells := event.get("map"):
            lengths, codes = int32(cells["lengths"]), int32(cells["codes"])
            starts = int32(cells["starts"]) if "starts" in cells else np.cumsum(lengths) - lengths
            for start, length, code in zip(starts, lengths, codes, strict=True):
                self.codes[start : start + length] = code

    def take_raw(self, raw: bytes) -> None:
        for block in raw.decode().split("\n\n")[:-1]:
            kind, data = block.split("\n")
            self.take(kind.removeprefix("event: "), json.loads(data.removeprefix("data: ")))

    @property
    def resident(self) -> NDArray[np.bool_]:
        bits = np.unpackbits(np.frombuffer(base64.b64decode(self.known["resident"]), np.uint8), bitorder="little")
        return bits[: -(-self.known["cells"] // self.known["extent_cells"])].astype(np.bool_)


def int32(column: str) -> NDArray[np.int32]:
    return np.frombuffer(base64.b64decode(column), "<i4")


@asynccontextmanager
async def page_of(**settings: Any) -> AsyncIterator[tuple[AsyncLLM, TrackedApp]]:
    """A server on the fake backend: its model, and the app with its address."""
    usual = {"latency_ms": 0.0, "layout": "paged", "window": 0, "states": 0}
    fake = {name: settings.pop(name, value) for name, value in usual.items()}
    tree = {"backend": {"type": "fake", "fake": fake}, "model": settings.pop("model", {})}
    config = Config.model_validate({**tree, "resources": settings.pop("resources", {}), "server": settings})
    async with AsyncLLM(config) as llm, served(llm) as app:  # type: ignore[arg-type]
        yield llm, app


@asynccontextmanager
async def reading(url: str, **headers: str) -> AsyncIterator[AsyncIterator[Reader]]:
    """Yields the reader after every event."""
    async with (
        httpx.AsyncClient(timeout=LIMIT_S) as client,
        client.stream("GET", f"{url}/kv/stream", headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield _events(response)


async def _events(response: httpx.Response) -> AsyncIterator[Reader]:
    reader, rest = Reader(), b""
    async for piece in response.aiter_raw():
        *blocks, rest = (rest + piece).split(b"\n\n")
        for block in blocks:
            reader.take_raw(block + b"\n\n")
            yield reader


async def watchers_gone(llm: AsyncLLM, app: TrackedApp) -> None:
    """Wait until nobody watches any more, for the engine and the server."""

    async def gone() -> None:
        while watchers(llm) or app.active or app.leftovers():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(gone(), LIMIT_S)


def watchers(llm: AsyncLLM) -> int:
    assert llm.executor.engine is not None
    return llm.executor.engine.views._watchers
