"""The server process of `cllm serve`, from binding the port to shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator

import uvicorn

from cllm.cli.out_of_memory import explain_bus_errors
from cllm.config import Config
from cllm.machine.resident import keep_loaded_objects
from cllm.models.registry import resolve
from cllm.observe.log import EfficiencyLog, RequestLog, setup_logging, stop_logging
from cllm.served import open_models
from cllm.server.app import create_app
from cllm.server.http.listening import bind, explain, url_of, uvicorn_config
from cllm.server.state import ServerState

log = logging.getLogger("cllm.serve")

ONE_SIGNAL_S = 0.3
"""Signals closer together than this count as one: Ctrl-C may arrive from the terminal and from the parent process."""
DELIVERY_S = 2
"""After the grace period, time for the last responses to reach their clients."""


def run_server(config: Config) -> int:
    """Serve until a signal arrives; return the exit code. Bind the port first, to load no model in vain."""
    setup_logging(config.log)
    with bind(config.server) as listener:
        if config.backend.type != "fake" and not config.models:
            resolve(config.model.name)  # here, so that Ctrl-C stops a download
        server = Server(config, listener)
        with contextlib.suppress(asyncio.CancelledError):
            server.run(sockets=[listener])
        return server.exit_code


class Server(uvicorn.Server):
    """Uvicorn with cLLM's connections and signals: the first signal shuts down gracefully, the second at once."""

    def __init__(self, config: Config, listener: socket.socket) -> None:
        self.exit_code = 0
        self._serves = open_models(config, before_mapping=explain_bus_errors)
        self._settings = config
        self._listener = listener
        self._serving: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._signalled_at: float | None = None
        app = create_app(self._serves, config)
        self._state: ServerState = app.state.cllm
        super().__init__(uvicorn_config(app, config.server, self._state.registry, delivery_s=DELIVERY_S))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._serving = asyncio.current_task(loop)
        for number in _signals():
            loop.add_signal_handler(number, self._on_signal, number)
        efficiency = self._observe()
        try:
            await self._serves.start()
            keep_loaded_objects()
            for each in efficiency:
                self._state.in_background(each.run())
            self._listen()
            await super().serve(sockets)
        finally:
            await self._state.end_background()
            await (self._closing or self._serves.shutdown(0))
            await self._state.close()

    def _observe(self) -> list[EfficiencyLog]:
        """Log the requests and the cache efficiency of every model."""
        interval_s = self._settings.log.efficiency_interval_s
        logs = []
        for served in self._serves.models:
            name = served.name if self._serves.sharing is not None else None
            served.observers.append(RequestLog(name))
            logs.append(EfficiencyLog(served.snapshot, interval_s, name))
        return logs

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._signalled_at is not None:
            if now - self._signalled_at < ONE_SIGNAL_S:
                return
            log.warning("%s again: stopping at once", number.name)
            stop_logging()
            os._exit(128 + number)
        self._signalled_at = now
        if self._serving and not self.started:
            self.should_exit = True
            self.exit_code = 128 + number
            self._serving.cancel()
            return
        grace_s = self._settings.server.shutdown_grace_s
        log.info(
            "%s: shutting down; running requests have %g s to finish (send it again to stop at once)",
            number.name,
            grace_s,
        )
        self._closing = asyncio.create_task(self._close(grace_s))

    async def _close(self, grace_s: float) -> None:
        """Keep the port open until the last answer is done, so that `/ready` can report the shutdown."""
        try:
            await self._serves.shutdown(grace_s)
        finally:
            self.should_exit = True

    def _listen(self) -> None:
        """If two processes are bound to the same port, this is where the second one fails."""
        try:
            self._listener.listen(self.config.backlog)
        except OSError as error:
            raise explain(error, self._settings.server) from error

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"cLLM is ready: {url_of(self._listener)} ({self._what_is_served()})", flush=True)

    def _what_is_served(self) -> str:
        serves = self._serves
        if serves.sharing is None and serves.default.llm is not None:
            return f"{serves.default.name}, {serves.default.llm.text.facts.traits.name}"
        loaded = [served.name for served in serves.models if served.ready]
        others = [served.name for served in serves.models if not served.ready]
        parts = ((loaded, "loaded"), (others, "on first use"))
        return "; ".join(f"{', '.join(names)} {how}" for names, how in parts if names)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's handlers: ours are installed before the model is loaded."""
        yield


def _signals() -> list[signal.Signals]:
    """The signals that stop the server. SIGHUP does, unless it was ignored at the start, as with nohup."""
    ending = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ending.append(signal.SIGHUP)
    return ending
