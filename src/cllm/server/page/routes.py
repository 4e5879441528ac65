"""`/`, the files it needs, and the stream that feeds it. None of them is part of the described API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm.server.errors import ClientGoneError
from cllm.server.http.response import unless_gone
from cllm.server.page.files import PageFile, docs_files, page_files
from cllm.server.page.hub import Hub
from cllm.server.state import still_allowed

_HEADERS = {
    "cache-control": "no-store",
    "x-accel-buffering": "no",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}


def add_page(app: FastAPI, hub_of: Callable[[str | None], Hub]) -> None:
    """`hub_of` finds the source of events for the name of a model, or for none."""
    router = _router_of(page_files())

    async def stream(request: Request, model: str | None = None) -> Response:
        return WatchStream(hub_of(model), partial(still_allowed, request))

    router.add_api_route("/kv/stream", stream, methods=["GET"])
    app.include_router(router)


def add_docs(app: FastAPI) -> None:
    """The API's description for people, at /docs."""
    app.include_router(_router_of(docs_files()))


def _router_of(found: Mapping[str, PageFile]) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for path, file in found.items():
        router.add_api_route(path, partial(_file, file), methods=["GET", "HEAD"])
    return router


async def _file(file: PageFile, request: Request) -> Response:
    return file.response(request)


class WatchStream(Response):
    """Events until the client leaves, its key is not good for them any more, or the engine ends."""

    media_type = "text/event-stream"

    def __init__(self, hub: Hub, still_allowed: Callable[[], bool]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._hub = hub
        self._may_still = still_allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGoneError):
            await unless_gone(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        started = False
        events = self._hub.events()
        try:
            async for data in events:  # at least one a second
                if not self._may_still():
                    break
                if not started:
                    started = True
                    await send(start)
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            await events.aclose()
        if not started:
            await send(start)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
