"""The files of the pages: part of the package, read once, sent with headers that keep everything foreign out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

FOLDER = "/page/"
DOCS = "/docs"
_INDEX = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; frame-ancestors 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        headers = {**_HEADERS, "etag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "content-type": self.media_type})


@cache
def page_files() -> dict[str, PageFile]:
    """The page's files, by the path they are served at."""
    return _read("static", "/", FOLDER)


@cache
def docs_files() -> dict[str, PageFile]:
    """The files of the page that shows the API's description."""
    return {**_read("docs", DOCS, f"{DOCS}/"), f"{DOCS}/icon.svg": page_files()[f"{FOLDER}icon.svg"]}


def _read(folder: str, index: str, others: str) -> dict[str, PageFile]:
    found = {}
    for file in files("cllm.server.page").joinpath(folder).iterdir():
        kind = file.name.rpartition(".")[2]
        if kind in _TYPES:
            content = file.read_bytes()
            path = index if file.name == _INDEX else others + file.name
            found[path] = PageFile(content, _TYPES[kind], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
