"""The ingress: the server's web application, over models that run elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.cluster.http_listener import HttpListener
from cllm.cluster.models import cluster_models
from cllm.cluster.overview import Seen, seen_model
from cllm.cluster.remote import RemoteExecutor
from cllm.cluster.remote_models import remote_models
from cllm.config import Config
from cllm.llm import AsyncLLM
from cllm.loading.open_model import ModelShare
from cllm.loading.text_model import PRELOADED
from cllm.machine.resident import keep_loaded_objects
from cllm.observe.log import RequestLog, setup_logging
from cllm.server.app import create_app
from cllm.server.http.listening import url_of
from cllm.server.state import ServerState
from cllm.work.pool import Workers

_END_S = 3.0
"""The end of the time to drain, for the ends of requests that take longer."""
_IDLE_S = 0.05

_built: list[ASGIApp] = []
"""The application of this process."""


class _ForRaysProxy:
    """The application without what others do. The ingress starts and stops its models. Ray Serve's proxy gives every
    request an id, which the application uses, and every response the header with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [header for header in message["headers"] if header[0] != b"x-request-id"]
            await send(message)

        if scope["type"] != "lifespan":
            await self._app(scope, receive, send_without_id)
            return
        message = {"type": ""}
        while message["type"] != "lifespan.shutdown":
            message = dict(await receive())
            await send({"type": f"{message['type']}.complete"})


def _application() -> ASGIApp:
    """Called by Ray Serve once the ingress is made."""
    return _built[0]


@serve.ingress(_application)
class Ingress:
    async def __init__(self, config: Config, replicas: Sequence[Any], listens: bool) -> None:  # type: ignore[misc]
        """`replicas`: Ray Serve's handles, in the order of `cluster_models`. `listens`: whether it has a port of its
        own, server.port; otherwise requests come through Ray's proxy."""
        setup_logging(config.log)
        models = cluster_models(config)
        workers = Workers(config.work, PRELOADED)
        workers.open()
        share = ModelShare(workers=workers)
        self._executors = {
            model.deployment: RemoteExecutor(model.config, handle, deployment=model.deployment, version=model.version)
            for model, handle in zip(models, replicas, strict=True)
        }
        llms = [AsyncLLM(model.config, share=share, executor=self._executors[model.deployment]) for model in models]
        await asyncio.gather(*(llm.start() for llm in llms))
        self._workers = workers
        self._serves = remote_models(config, llms)
        for llm in llms:
            llm.observers.append(RequestLog(llm.model_name if config.models else None))
        app = create_app(self._serves, config, servers=config.cluster.ingresses)
        self._state: ServerState = app.state.cllm
        self._drain_s = max(0.0, config.cluster.drain_s - _END_S)
        _built[:] = [_ForRaysProxy(app)]
        self._listener: HttpListener | None = None
        self._url: str | None = None
        if listens:
            self._listener = HttpListener(app, config.server, app.state.cllm.registry, drain_s=config.cluster.drain_s)
            self._url = url_of(await self._listener.start())
        keep_loaded_objects()

    async def seen(self) -> Seen:
        """For `cllm cluster status`."""
        await self._serves.refresh()
        found = zip(self._serves.models, self._executors.items(), strict=True)
        return Seen(self._url, {name: seen_model(executor, served.name) for served, (name, executor) in found})

    async def __del__(self) -> None:
        """Ray Serve kills it `drain_s` after this began."""
        if self._listener is not None:
            self._listener.stop_accepting()
        await self._until_idle()
        await self._serves.shutdown()  # ends what is left with an error
        self._workers.close()
        if self._listener is not None:
            await self._listener.close()
        await self._state.close()

    async def _until_idle(self) -> None:
        until = asyncio.get_running_loop().time() + self._drain_s
        while (
            any(executor.streams for executor in self._executors.values()) and asyncio.get_running_loop().time() < until
        ):
            await asyncio.sleep(_IDLE_S)
