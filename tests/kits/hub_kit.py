"""A Hugging Face hub on this machine: repositories as dictionaries of files, served as the client asks for them."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from cllm.errors import ModelError
from cllm.models.registry import resolve

Files = Mapping[str, bytes]


@dataclass
class Hub:
    """Files may be changed while it runs: the commit changes with them."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    slow: dict[str, float] = field(default_factory=dict)
    """Files that are sent half, then nothing for so many seconds, then the rest."""
    token: str | None = None
    """What clients must send, if anything."""
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def commit(self, repository: str) -> str:
        files = sorted(self.repositories[repository].items())
        return hashlib.sha1(repr([(name, digest(data)) for name, data in files]).encode()).hexdigest()

    def downloads(self) -> list[str]:
        """The files that were sent, by name."""
        paths = [line.removeprefix("GET ") for line in self.asked if line.startswith("GET ") and "/resolve/" in line]
        return [path.rpartition("/")[2] for path in paths]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repository = "/".join(parts[:2])
        if self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "who are you?"}, body)
        if repository in self.hub.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask first"}, body)
        files = self.hub.repositories.get(repository)
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"}, body)
        if path.startswith("/api/models/") and "tree" in parts:
            return self._send(200, json.dumps(list(_tree(files))).encode(), {}, body)
        if path.startswith("/api/models/"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            info = {"id": repository, "modelId": repository, "sha": self.hub.commit(repository), "siblings": siblings}
            return self._send(200, json.dumps(info).encode(), {}, body)
        return self._send_file(repository, files, "/".join(parts[4:]), body)

    def _send_file(self, repository: str, files: Files, name: str, body: bool) -> None:
        if name not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
        headers = {"ETag": f'"{digest(files[name])}"', "X-Repo-Commit": self.hub.commit(repository)}
        return self._send(200, files[name], headers, body, self.hub.slow.get(name, 0.0))

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], body: bool, pause_s: float = 0.0) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if not body:
            return
        half = len(data) // 2
        self.wfile.write(data[:half])
        self.wfile.flush()
        time.sleep(pause_s)
        self.wfile.write(data[half:])


def _tree(files: Files) -> Iterator[dict[str, Any]]:
    for name, data in files.items():
        yield {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def run_hub(**options: Any) -> Iterator[Hub]:
    hub = Hub(**options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


WEIGHTS = random.Random(0).randbytes(3_000_000)
FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{     }",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[:1000],
    "model.safetensors.index.json": b"{ }",
    "tokenizer.json": b"{  }",
    "tokenizer_config.json": b"{   }",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"runs code",
    "modeling.py": b"runs code",
    "original/consolidated.pth": b"the same weights once more",
}


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """The client reads its environment when it is imported."""
    import huggingface_hub.constants as constants
    from huggingface_hub import HfApi

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    original = HfApi.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **({"endpoint": endpoint} | options))

    monkeypatch.setattr(HfApi, "__init__", init)


def silent(done: int, total: int) -> None:
    pass


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(name, progress=silent, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
