"""Listening for HTTP: binding the port, and uvicorn with cLLM's connections."""

from __future__ import annotations

import errno
import logging
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from cllm.errors import ConfigError
from cllm.server.http.connection import Connection
from cllm.server.http.connections import Connections, room_for

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from starlette.types import ASGIApp

    from cllm.config import ServerConfig

log = logging.getLogger("cllm.serve")

KEEP_ALIVE_S = 65
"""Longer than HTTP clients keep idle connections, so that the server never closes one that a client is about to use."""


def bind(config: ServerConfig, *, shared: bool = False) -> socket.socket:
    """A socket bound to the configured address, not listening yet. `shared`: others may bind the same port, and get
    some of its connections."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"server.host is {config.host!r}, which is not an address of this machine: {error}"
        ) from error
    # "localhost" is often both; prefer IPv4, which clients try first.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise explain(error, config) from error
    return listener


def explain(error: OSError, config: ServerConfig) -> ConfigError:
    """Why the port cannot be used."""
    place = f"port {config.port} on {config.host}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{place} is already in use: choose another with --port")
    if error.errno == errno.EACCES:
        return ConfigError(f"no permission to use {place}: choose a port above 1023 with --port")
    return ConfigError(f"cannot listen on {place}: {error.strerror}; choose an address of this machine with --host")


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def uvicorn_config(
    app: ASGIApp, config: ServerConfig, registry: CollectorRegistry, *, delivery_s: float
) -> uvicorn.Config:
    """`registry` gets the metrics of connections. `delivery_s`: how long the last responses have to reach
    their clients during a shutdown."""
    most, backlog = room_for(config.max_connections)
    if most < config.max_connections:
        log.warning("the open-file limit allows only %d connections (server.max_connections)", most)
    connections = Connections(config, most)
    registry.register(connections)
    protocol: Any = partial(Connection, connections)
    return uvicorn.Config(
        app,
        http=protocol,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",  # whoever serves loads and closes the model; uvicorn would log a signal meanwhile as a failure
        backlog=backlog,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(delivery_s),
    )
