"""`/`, the files it needs, and the stream that feeds it. None of them is part of the described API."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm.server.answers import unless_gone
from cllm.server.errors import ClientGoneError
from cllm.server.page.files import PageFile, page_files
from cllm.server.page.hub import Hub

_HEADERS = {
    "cache-control": "no-store",
    "x-accel-buffering": "no",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}


def add_page(app: FastAPI, hub_of: Callable[[str | None], Hub]) -> None:
    """`hub_of` finds the source of events for the name of a model, or for none."""
    router = APIRouter(include_in_schema=False)
    for path, file in page_files().items():
        router.add_api_route(path, partial(_file, file), methods=["GET"])

    async def stream(model: str | None = None) -> Response:
        return WatchStream(hub_of(model))

    router.add_api_route("/kv/stream", stream, methods=["GET"])
    app.include_router(router)


async def _file(file: PageFile, request: Request) -> Response:
    return file.response(request)


class WatchStream(Response):
    """Events until the client leaves or the engine ends."""

    media_type = "text/event-stream"

    def __init__(self, hub: Hub) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._stream(send))
        except ClientGoneError:
            return

    async def _stream(self, send: Send) -> None:
        started = False
        events = self._hub.events()
        try:
            async for data in events:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            await events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
