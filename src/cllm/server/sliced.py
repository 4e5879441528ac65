"""JSON answers of any size, written a slice at a time: others' events go out between two of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm.server.answers import unless_gone
from cllm.server.errors import ClientGoneError

SLICE_BYTES = 16_384
"""Of log probabilities, a millisecond's work."""
_ENTRIES = 16
_CHARACTERS = 16_384


class SlicedJson(Response):
    """An answer made of pieces of JSON, each of which takes little time to make."""

    media_type = "application/json"

    def __init__(self, pieces: Iterable[str]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._slices = map(str.encode, slices(pieces))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = next(self._slices)
        following = next(self._slices, None)
        headers = self.raw_headers
        if following is None:
            headers = [*headers, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        if following is None:
            await send({"type": "http.response.body", "body": body})
            return

        async def write() -> None:
            nonlocal body, following
            while following is not None:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.sleep(0)
                body, following = following, next(self._slices, None)
            await send({"type": "http.response.body", "body": body})

        try:
            await unless_gone(receive, write())
        except ClientGoneError:
            return


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def as_json(value: Any) -> str:
    return _ENCODER.encode(value)


def text_pieces(*texts: str) -> Iterator[str]:
    """One JSON string that holds all texts, in pieces."""
    yield '"'
    for text in texts:
        for start in range(0, len(text), _CHARACTERS):
            yield as_json(text[start : start + _CHARACTERS])[1:-1]
    yield '"'


def list_pieces(items: Iterable[str], entries: int = _ENTRIES) -> Iterator[str]:
    """A JSON list of items that are JSON already, so many at a time."""
    rest = iter(items)
    start = "["
    while some := list(islice(rest, entries)):
        yield start + ",".join(some)
        start = ","
    yield "[]" if start == "[" else "]"


def slices(pieces: Iterable[str]) -> Iterator[str]:
    """Pieces joined to some of about `SLICE_BYTES` characters; of any piece, at least one."""
    held: list[str] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= SLICE_BYTES:
            yield "".join(held)
            held, size = [], 0
    if held:
        yield "".join(held)
