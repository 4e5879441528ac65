"""The app of a model in this process: with a client of its own, or behind a real uvicorn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from cllm.config import Config
from cllm.llm import AsyncLLM
from cllm.server.app import create_app
from cllm.server.http.connection import Connection
from cllm.server.http.connections import Connections
from scripted_llm import Scripted


def config_with(**server: Any) -> Config:
    return Config.model_validate({"server": server})


def app_for(llm: AsyncLLM) -> FastAPI:
    return create_app(llm, llm.config)


@asynccontextmanager
async def client_for(llm: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app itself, without a network."""
    transport = httpx.ASGITransport(app=app_for(llm), raise_app_exceptions=False)
    async with _running(llm), httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def _running(llm: AsyncLLM) -> AbstractAsyncContextManager[None]:
    """A scripted one runs while it is used; others are started by the test, or not."""
    return llm.running() if isinstance(llm, Scripted) else nullcontext()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.up.set()


class TrackedApp:
    """Knows when no request is being handled any more."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.idle = asyncio.Event()
        self.active = 0
        self.url = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.active += 1
        self.idle.clear()
        try:
            await self.app(scope, receive, send)
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()

    def leftovers(self) -> list[asyncio.Task[Any]]:
        """Tasks of the server package that still live."""
        mine = []
        for task in asyncio.all_tasks():
            code = getattr(task.get_coro(), "cr_code", None)
            if code is not None and "/cllm/server/" in code.co_filename:
                mine.append(task)
        return mine


@asynccontextmanager
async def served(llm: AsyncLLM) -> AsyncIterator[TrackedApp]:
    """The app behind a real uvicorn on a free port; `url` says where."""
    tracked = TrackedApp(app_for(llm))
    protocol: Any = partial(Connection, Connections(llm.config.server))
    server = _Server(uvicorn.Config(tracked, http=protocol, port=0, log_level="warning", lifespan="off"))
    async with _running(llm):
        task = asyncio.ensure_future(server.serve())
        await server.up.wait()
        tracked.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield tracked
        finally:
            server.should_exit = True
            await task
