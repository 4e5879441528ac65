"""All connections of a server: how many there may be, and who goes first when there are too many."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cllm.errors import ConfigError
from cllm.machine.files import allow_open_files
from cllm.server.errors import Problem

if TYPE_CHECKING:
    from cllm.config import ServerConfig

log = logging.getLogger("cllm.server")

LOG_EVERY_S = 10.0
_ONE_READ = 262_144
"""Bytes that the event loop reads from a connection at a time, at most."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
FEWEST_FILES = 9
"""Of those that are not open yet: with fewer, the event loop cannot even be made."""
SPARE_FILES = 32
"""File descriptors for everything but connections: the model, the event loop, the log."""


def room_for(wanted: int) -> tuple[int, int]:
    """How many connections and how long a backlog the process has file descriptors for.

    All that wait to be accepted may be accepted in one go before the first of them can be refused, so both need room.
    """
    allowed = allow_open_files(wanted + BACKLOG + _open_files() + SPARE_FILES)
    if allowed is None:
        return wanted, BACKLOG
    if allowed - _open_files() < FEWEST_FILES:
        least = _open_files() + FEWEST_FILES
        raise ConfigError(f"the limit of open files is {allowed} (ulimit -n); a server needs at least {least}")
    room = max(2, allowed - _open_files() - SPARE_FILES)
    connections = min(wanted, max(1, room * 3 // 4))
    return connections, min(BACKLOG, room - connections)


def _open_files() -> int:
    try:
        return sum(1 for _ in Path("/dev/fd").iterdir())
    except OSError:
        return 16


class Member(Protocol):
    """A connection, as far as it concerns the others."""

    def shed(self) -> None: ...

    def refuse(self, problem: Problem) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Connections(Collector):
    """Knows for whom the server waits: those clients pay when room is needed, the longest silent first."""

    def __init__(self, limits: ServerConfig, most: int | None = None) -> None:
        self.limits = limits
        self.most = limits.max_connections if most is None else most
        self.open = 0
        self.shed = 0
        self.refused = 0
        self.stalled = 0
        self.crowded = 0
        self._silent: dict[Member, None] = {}
        """No whole request of theirs is here: new ones, idle ones, those in the middle of their headers."""
        self._sending: dict[Member, int] = {}
        """In the middle of a body, of which so many bytes are held; in order of their beginning."""
        self._held = 0
        """Bytes of all these bodies."""
        self._waiting: dict[Member, None] = {}
        """Those of them that are not read from until others are done."""
        self._logged_at = float("-inf")
        self._unlogged = [0, 0]

    # -- connections say how they are --------------------------------------------------------------------------

    def opened(self, member: Member) -> None:
        """Count it. One too many costs the longest silent client its connection, or the new one if none is silent."""
        self.open += 1
        if self.open <= self.most:
            return
        others = (other for group in (self._silent, self._sending) for other in group)
        victim = next((other for other in others if other is not member), None)
        if victim is None:
            self.refused += 1
            self._unlogged[1] += 1
            message = f"All {self.most} connections are in use (server.max_connections)."
            member.refuse(Problem(503, "unavailable_error", message, code="too_many_connections", headers=_RETRY))
        else:
            self.shed += 1
            self._unlogged[0] += 1
            self.busy(victim)
            victim.shed()
        self._log()

    def closed(self, member: Member) -> None:
        self.open -= 1
        self.busy(member)

    def silent(self, member: Member) -> None:
        self.busy(member)
        self._silent[member] = None

    def sending(self, member: Member) -> None:
        self.busy(member)
        self._sending[member] = 0

    def busy(self, member: Member) -> None:
        """It is the server's turn."""
        self._silent.pop(member, None)
        self._let_read(member)
        held = self._sending.pop(member, None)
        if held is not None:
            self._held -= held
            self._share_room()

    def holds(self, member: Member, size: int) -> None:
        """So many bytes of its body are here. Where that is too much with all others, all but the oldest have to wait;
        who begins a body even so, and brings more than there is room for, is sent away."""
        if member not in self._sending:
            return
        self._held += size - self._sending[member]
        self._sending[member] = size
        if self._held <= self.limits.max_bodies_bytes:
            return
        oldest = next(iter(self._sending))
        if member is not oldest and self._held > self.limits.max_bodies_bytes + self.limits.max_body_bytes:
            self.crowded += 1
            member.refuse(too_many_bodies("Too many large requests are being received at once"))
            return
        for other in self._sending:
            if other is not oldest and other not in self._waiting:
                self._waiting[other] = None
                other.pause_reading()

    def _share_room(self) -> None:
        """Bytes were let go: the oldest goes on in any case, others as far as there is room for what they bring."""
        room = self.limits.max_bodies_bytes - self._held
        oldest = next(iter(self._sending), None)
        for member in [other for other in self._sending if other in self._waiting]:
            if member is not oldest and room <= 0:
                return
            self._let_read(member)
            room -= _ONE_READ

    def _let_read(self, member: Member) -> None:
        if member in self._waiting:
            del self._waiting[member]
            member.resume_reading()

    def note_stalled(self) -> None:
        self.stalled += 1
        seconds = self.limits.write_timeout_s
        log.info("a client did not read fast enough for %g s (server.write_timeout_s): cut off", seconds)

    # -- and what is told of them ------------------------------------------------------------------------------

    def _log(self) -> None:
        """One line for many: who floods the server with connections must not flood its log, too."""
        now = time.monotonic()
        if now - self._logged_at < LOG_EVERY_S:
            return
        shed, refused = self._unlogged
        self._logged_at, self._unlogged = now, [0, 0]
        log.warning(
            "all %d connections are taken (server.max_connections); since the last such line %d silent ones were "
            "closed for new ones, %d new ones refused",
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
