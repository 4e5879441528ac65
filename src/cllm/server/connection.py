"""One HTTP/1.1 connection: one answer after another, time limits, and noticing who is gone.

uvicorn makes one of these for each connection (`http=` of its configuration); what it asks of them is the constructor's
arguments and `shutdown`. Its own protocols leave open what is closed here: headers without end, clients that send or
read nothing, pipelined requests whose client leaves, connections that are closed by half.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from cllm.server.connections import Connections, too_many_bodies
from cllm.server.errors import Problem
from cllm.server.exchange import Exchange, Headers, refusal_of
from cllm.server.parsing import RefusedError, RequestReader

if TYPE_CHECKING:
    import uvicorn
    from uvicorn.server import ServerState

SLICE = 16_384
"""Bytes that are parsed before the limits are looked at again."""
LINGER_S = 2.0
"""How long a client that still sends is listened to after a refusal. If the connection were closed at once, the system
would answer the bytes that nobody read with a reset, and the client might never see the refusal."""
STATUS_LINE_BEGIN = b"HTTP/1.1 "
PROBE_S = 0.05
"""From the first look whether a client that has closed its half is still there to the second."""
PROBE_GROWTH = 4
"""So many times as long it is to each further look. There are nine: the last comes after a quarter of an hour."""


class Connection(asyncio.Protocol):
    """Requests in, answers out, in order."""

    def __init__(
        self,
        others: Connections,
        *,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self._loop = _loop or asyncio.get_running_loop()
        self._app: Any = config.loaded_app
        self._keep_alive_s = config.timeout_keep_alive
        self._root_path = config.root_path
        self._app_state = app_state
        self._server = server_state
        self._others = others
        self._limits = others.limits
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._reader: RequestReader = None  # type: ignore[assignment]
        self._active: Exchange | None = None
        """The one that is being answered."""
        self._queue: deque[Exchange] = deque()
        """Those that came before the active one was answered."""
        self._ahead = bytearray()
        """Bytes that came before that, and are not parsed yet."""
        self._deaf = False
        """Whatever else comes is thrown away; after the answers to what is here the connection ends."""
        self._unheard = False
        """Something was thrown away."""
        self._idle = False
        """Between two requests: time for headers runs from the first byte of the next."""
        self._half_closed = False
        self._probes = 0
        self._begun_with = 0
        """Bytes of the status line that are written already."""
        self._kept_waiting = False
        """The active request's body was not read for a while, for there was no room for it."""
        self._reading = True
        self._writable = asyncio.Event()
        self._writable.set()
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._prober: asyncio.TimerHandle | None = None

    # -- the transport's side ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by descent
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "http",
            "server": _address(transport.get_extra_info("sockname")),
            "client": _address(transport.get_extra_info("peername")),
            "root_path": self._root_path,
            "state": self._app_state,
        }
        most_head = self._limits.max_header_bytes
        self._reader = RequestReader(self._begin, scope, most_head, self._on_head, self._on_end)
        self._server.connections.add(self)  # type: ignore[arg-type]
        self._others.silent(self)
        self._watch(self._limits.header_timeout_s, self._on_late_head)
        self._others.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self._transport.is_closing():
            self._unheard = True
            return
        if self._idle:
            self._idle = False
            self._watch(self._limits.header_timeout_s, self._on_late_head)
        self._feed(data)

    def eof_received(self) -> bool:
        """Keep the connection if a whole request waits for its answer: its client may have closed one half only."""
        self._half_closed = True
        if self._active is None or not self._active.received:
            return False
        self._probe()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._others.closed(self)
        self._deaf = True
        self._forget()
        self._writable.set()
        for timer in (self._timer, self._stall, self._prober):
            if timer is not None:
                timer.cancel()
        self._reader.close()

    def pause_writing(self) -> None:
        self._writable.clear()
        self._stall = self._loop.call_later(self._limits.write_timeout_s, self._on_stalled)

    def resume_writing(self) -> None:
        self._writable.set()
        if self._stall is not None:
            self._stall.cancel()

    # -- the server's side -------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish what is being answered, then end."""
        if self._active is None:
            self._close()
        else:
            self._stop_listening()

    def shed(self) -> None:
        """Make room for somebody else, at once."""
        if self._active is not None and not self._active.started:
            message = "Closed to make room: the request was incomplete and server.max_connections was reached."
            self._write_refusal(Problem(503, "unavailable_error", message, code="too_many_connections"))
            self._forget()
            self._close()
        else:
            self.abort()

    def refuse(self, problem: Problem) -> None:
        """Answer this and end, whatever the client still sends."""
        self._deaf = True
        if self._active is None or not self._active.started:
            self._write_refusal(problem)
        self._forget()
        self._active = None
        self._linger()

    # -- the exchange's side -----------------------------------------------------------------------------------

    @property
    def default_headers(self) -> Headers:
        return self._server.default_headers

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def write_head(self, head: bytes) -> None:
        self._transport.write(head[self._begun_with :])
        self._begun_with = 0

    async def drain(self) -> None:
        await self._writable.wait()

    def pause_reading(self) -> None:
        self._kept_waiting = True
        if self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    def abort(self) -> None:
        self._transport.abort()

    def answered(self) -> None:
        done = self._active
        assert done is not None
        self._server.total_requests += 1
        if not done.keep_alive:
            self._deaf = True
            if done.received and not self._unheard:
                self._close()
            else:
                self._linger()
        elif done.received:
            self._advance()
        else:
            self._others.sending(self)  # the rest of its body comes first, and is not kept

    # -- requests ----------------------------------------------------------------------------------------------

    def _must_wait(self) -> bool:
        """What comes now belongs to a request that is not the active one: its turn is later."""
        return self._active is not None and (self._active.received or self._reader.incoming is not self._active)

    def _feed(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            if self._must_wait():
                self._hold(data[start:])
                return
            try:
                self._reader.feed(data[start : start + SLICE])
            except RefusedError as refusal:
                if self._must_wait():
                    self._unheard = True
                    self._stop_listening()  # those before it are answered first
                else:
                    self.refuse(refusal.problem)
            if self._deaf:
                return
        self._count_body()

    def _count_body(self) -> None:
        if self._active is not None and not self._active.received:
            self._others.holds(self, self._active.held)

    def _hold(self, data: bytes) -> None:
        if len(self._ahead) + len(data) <= self._limits.max_header_bytes:
            self._ahead += data
        else:
            self._unheard = True
            self._stop_listening()

    def _stop_listening(self) -> None:
        """End after the answers to what is here as a whole: the rest may be sent again, on another connection."""
        self._deaf = True
        self._ahead.clear()
        self._queue = deque(exchange for exchange in self._queue if exchange.received)
        if self._active is None or (self._active.answered and not self._active.received):
            self._linger()
        else:
            (self._queue[-1] if self._queue else self._active).keep_alive = False

    def _begin(self) -> Exchange:
        return Exchange(self, self._limits.max_body_bytes)

    def _on_head(self, exchange: Exchange) -> None:
        if self._active is None:
            self._start(exchange)
        else:
            self._queue.append(exchange)

    def _on_end(self, exchange: Exchange) -> None:
        if exchange is self._active:
            self._unwatch()
            self._others.busy(self)
            if exchange.answered:
                self._loop.call_soon(self._advance)  # not now: the parser is in the middle of something

    def _start(self, exchange: Exchange) -> None:
        self._active = exchange
        self._kept_waiting = False
        if exchange.received:
            self._unwatch()
            self._others.busy(self)
        else:
            self._others.sending(self)
            self._watch(self._limits.body_timeout_s, self._on_late_body)
        task = self._loop.create_task(exchange.run(self._app))
        task.add_done_callback(self._server.tasks.discard)
        self._server.tasks.add(task)
        if self._half_closed:
            self._probes = 0
            self._probe()

    def _advance(self) -> None:
        """The active exchange is over, and the connection stays."""
        self._active = None
        if self._transport.is_closing():
            return
        if self._queue:
            self._start(self._queue.popleft())
        if self._ahead and not self._must_wait():
            data = bytes(self._ahead)
            self._ahead.clear()
            self._feed(data)
        self._count_body()
        if self._active is not None:
            return
        if self._deaf:
            self._linger()
            return
        self._others.silent(self)
        if self._half_closed:
            self._close()
        elif self._reader.between:
            self._idle = True
            self._watch(self._keep_alive_s, self._close)
        else:
            self._watch(self._limits.header_timeout_s, self._on_late_head)

    def _forget(self) -> None:
        """Whoever is at work for this client learns that it is gone."""
        for exchange in (self._active, *self._queue):
            if exchange is not None:
                exchange.leave()
        self._queue.clear()
        self._ahead.clear()

    def _probe(self) -> None:
        """Is the other half of the connection still open? Only writing tells: who is gone sends a reset for it. So
        bytes are written that change nothing: an answer begins with the same ones whatever it will be, and the size of
        its next chunk may begin with zeros.
        """
        active = self._active
        if active is None or active.answered or self._probes == len(STATUS_LINE_BEGIN):
            return
        if active.started:
            if active.chunked:
                self._transport.write(b"0")
        else:
            self._transport.write(STATUS_LINE_BEGIN[self._probes : self._probes + 1])
            self._begun_with += 1
        self._prober = self._loop.call_later(PROBE_S * PROBE_GROWTH**self._probes, self._probe)
        self._probes += 1

    # -- time, and the end -------------------------------------------------------------------------------------

    def _watch(self, seconds: float, then: Callable[[], None]) -> None:
        self._unwatch()
        self._timer = self._loop.call_later(seconds, then)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late_head(self) -> None:
        if self._reader.between:
            self._close()  # it never said anything
        else:
            self.refuse(_late("headers", self._limits.header_timeout_s, "server.header_timeout_s"))

    def _on_late_body(self) -> None:
        seconds = self._limits.body_timeout_s
        if self._kept_waiting:
            self.refuse(too_many_bodies(f"Other large requests left no room for this one for {seconds:g} s"))
        else:
            self.refuse(_late("body", seconds, "server.body_timeout_s"))

    def _on_stalled(self) -> None:
        self._others.note_stalled()
        self.abort()

    def _write_refusal(self, problem: Problem) -> None:
        self.write_head(refusal_of(self._active, problem, self.default_headers))

    def _linger(self) -> None:
        """Say that this was all, and throw away what comes until the client has understood."""
        if self._transport.is_closing():
            return
        if self._half_closed:
            self._close()
            return
        self._others.silent(self)
        self._transport.write_eof()
        self.resume_reading()
        self._watch(LINGER_S, self.abort)

    def _close(self) -> None:
        """What was written is still sent, but not for ever."""
        self._transport.close()
        self._watch(self._limits.write_timeout_s, self.abort)


def _late(what: str, seconds: float, key: str) -> Problem:
    message = f"The request's {what} did not come within {seconds:g} s ({key})."
    return Problem(408, "timeout_error", message, code="slow_request")


def _address(name: Any) -> tuple[str, int] | None:
    """Host and port; sockets of other families have none."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) and len(name) >= 2 else None
