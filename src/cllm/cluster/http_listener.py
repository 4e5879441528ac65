"""The HTTP server of an ingress, in its own process.

Through Ray Serve's proxy every piece of every stream costs milliseconds of two processes. So an ingress listens itself,
with the same server as `cllm serve`; the proxy works as well, where something else needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from cllm.config import ServerConfig
from cllm.server.http.listening import bind, uvicorn_config


class HttpListener(uvicorn.Server):
    def __init__(self, app: ASGIApp, config: ServerConfig, registry: CollectorRegistry, *, drain_s: float) -> None:
        """The port is shared: during an update, the new ingress listens while the old one finishes its requests."""
        super().__init__(uvicorn_config(app, config, registry, delivery_s=drain_s))
        self._socket = bind(config, shared=True)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> socket.socket:
        """The socket it listens on."""
        self._serving = asyncio.create_task(self.serve(sockets=[self._socket]))
        while not self.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.01)
        return self._socket

    def stop_accepting(self) -> None:
        """No more connections; open requests go on."""
        self.should_exit = True

    async def close(self) -> None:
        """Let the open requests finish."""
        self.stop_accepting()
        if self._serving is not None:
            await self._serving

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are Ray's."""
        yield
