"""All connections of a server: how many are allowed, and which are closed when there are too many."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cllm.errors import ConfigError
from cllm.machine.open_files import raise_open_file_limit
from cllm.server.errors import Problem

if TYPE_CHECKING:
    from cllm.config import ServerConfig
    from cllm.server.http.connection import Connection

log = logging.getLogger("cllm.server")

LOG_EVERY_S = 10.0
_ONE_READ = 262_144
"""Most bytes that the event loop reads from a connection at a time."""
BACKLOG = 2048
"""Connections waiting to be accepted."""
FEWEST_FILES = 9
"""Free file descriptors that the event loop needs to start."""
SPARE_FILES = 32
"""File descriptors for everything but connections: the model, the event loop, the log."""


def room_for(wanted: int) -> tuple[int, int]:
    """(connections, backlog) that the process has file descriptors for.

    The whole backlog may be accepted before the first connection can be refused, so both need descriptors.
    """
    allowed = raise_open_file_limit(wanted + BACKLOG + _open_files() + SPARE_FILES)
    if allowed is None:
        return wanted, BACKLOG
    if allowed - _open_files() < FEWEST_FILES:
        least = _open_files() + FEWEST_FILES
        raise ConfigError(f"the limit on open files is {allowed} (ulimit -n); a server needs at least {least}")
    room = max(2, allowed - _open_files() - SPARE_FILES)
    connections = min(wanted, max(1, room * 3 // 4))
    return connections, min(BACKLOG, room - connections)


def _open_files() -> int:
    try:
        return sum(1 for _ in Path("/dev/fd").iterdir())
    except OSError:
        return 16


class Connections(Collector):
    """Knows which clients the server is waiting for: when room is needed they are closed, the longest silent first."""

    def __init__(self, limits: ServerConfig, most: int | None = None) -> None:
        self.limits = limits
        self.most = limits.max_connections if most is None else most
        self.open = 0
        self.shed = 0
        self.refused = 0
        self.stalled = 0
        self.crowded = 0
        self._silent: dict[Connection, None] = {}
        """Without a complete request: new or idle connections, or in the middle of headers."""
        self._sending: dict[Connection, int] = {}
        """In the middle of a body, with the bytes held so far, oldest first."""
        self._held = 0
        """Bytes of all incomplete bodies."""
        self._waiting: dict[Connection, None] = {}
        """Paused until other bodies are complete."""
        self._logged_at = float("-inf")
        self._unlogged = [0, 0]

    # -- called by connections ---------------------------------------------------------------------------------

    def opened(self, peer: Connection) -> None:
        """Count it. If that is one too many, close the longest silent connection, or refuse the new one if none is."""
        self.open += 1
        if self.open <= self.most:
            return
        others = (other for group in (self._silent, self._sending) for other in group)
        victim = next((other for other in others if other is not peer), None)
        if victim is None:
            self.refused += 1
            self._unlogged[1] += 1
            message = f"All {self.most} connections are in use (server.max_connections)."
            peer.refuse(Problem(503, "unavailable_error", message, code="too_many_connections", headers=_RETRY))
        else:
            self.shed += 1
            self._unlogged[0] += 1
            self.busy(victim)
            victim.shed()
        self._log()

    def closed(self, peer: Connection) -> None:
        self.open -= 1
        self.busy(peer)

    def silent(self, peer: Connection) -> None:
        self.busy(peer)
        self._silent[peer] = None

    def sending(self, peer: Connection) -> None:
        self.busy(peer)
        self._sending[peer] = 0

    def busy(self, peer: Connection) -> None:
        """Its request is complete, or it is closed: nothing to wait for."""
        self._silent.pop(peer, None)
        self._let_read(peer)
        held = self._sending.pop(peer, None)
        if held is not None:
            self._held -= held
            self._share_room()

    def holds(self, peer: Connection, size: int) -> None:
        """`size` bytes of its body have arrived. If all bodies together are too large, pause all but the oldest;
        refuse a connection that exceeds the room left even so."""
        if peer not in self._sending:
            return
        self._held += size - self._sending[peer]
        self._sending[peer] = size
        if self._held <= self.limits.max_bodies_bytes:
            return
        oldest = next(iter(self._sending))
        if peer is not oldest and self._held > self.limits.max_bodies_bytes + self.limits.max_body_bytes:
            self.crowded += 1
            peer.refuse(too_many_bodies("Too many large requests are being received at once"))
            return
        for other in self._sending:
            if other is not oldest and other not in self._waiting:
                self._waiting[other] = None
                other.pause_reading()

    def _share_room(self) -> None:
        """Resume the oldest body in any case, others as far as there is room for one read each."""
        room = self.limits.max_bodies_bytes - self._held
        oldest = next(iter(self._sending), None)
        for peer in [other for other in self._sending if other in self._waiting]:
            if peer is not oldest and room <= 0:
                return
            self._let_read(peer)
            room -= _ONE_READ

    def _let_read(self, peer: Connection) -> None:
        if peer in self._waiting:
            del self._waiting[peer]
            peer.resume_reading()

    def note_stalled(self) -> None:
        self.stalled += 1
        seconds = self.limits.write_timeout_s
        log.info("disconnected a client that read too slowly for %g s (server.write_timeout_s)", seconds)

    # -- log and metrics ---------------------------------------------------------------------------------------

    def _log(self) -> None:
        """One line for many: a flood of connections must not flood the log."""
        now = time.monotonic()
        if now - self._logged_at < LOG_EVERY_S:
            return
        shed, refused = self._unlogged
        self._logged_at, self._unlogged = now, [0, 0]
        log.warning(
            "all %d connections are in use (server.max_connections); since the last such line, %d silent ones were "
            "closed to make room and %d new ones refused",
            self.most,
            shed,
            refused,
        )

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        prefix = self.limits.metrics_prefix
        yield GaugeMetricFamily(f"{prefix}:http_connections", "Open connections.", value=self.open)
        ended = CounterMetricFamily(
            f"{prefix}:http_connections_cut", "Connections that the server ended for its own sake.", labels=["reason"]
        )
        for reason in ("shed", "refused", "stalled", "crowded"):
            ended.add_metric([reason], getattr(self, reason))
        yield ended


_RETRY = {"Retry-After": "1"}


def too_many_bodies(why: str) -> Problem:
    message = f"{why} (server.max_bodies_bytes). Try again later."
    return Problem(503, "unavailable_error", message, code="too_many_bodies", headers=_RETRY)
