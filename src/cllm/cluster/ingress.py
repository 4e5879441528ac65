"""The ingress: the server's web application, over models that run elsewhere."""

from __future__ import annotations

from typing import Any

from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from cllm.cluster.remote_llm import RemoteLLM
from cllm.config import Config
from cllm.server.app import create_app

_application: list[ASGIApp] = []
"""The application of this process: Ray wants one before the models are known."""


async def _forward(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await _no_lifespan(receive, send)
    else:
        await _application[0](scope, receive, send)


async def _no_lifespan(receive: Receive, send: Send) -> None:
    """The ingress starts and stops its models itself."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


@serve.ingress(_forward)
class Ingress:
    async def __init__(self, config: Config, replicas: Any) -> None:  # type: ignore[misc]
        self._llm = RemoteLLM(config, replicas)
        await self._llm.start()
        _application[:] = [create_app(self._llm, config)]

    async def __del__(self) -> None:
        await self._llm.shutdown()
