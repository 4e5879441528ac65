"""One HTTP/1.1 connection: responses in order, timeouts, and disconnects noticed at once.

uvicorn creates one per connection (`http=` of its configuration) and needs only the constructor's arguments and
`shutdown`. Unlike its own protocols, this one copes with endless headers, clients that send or read nothing, pipelined
requests whose client disconnects, and half-closed connections.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from cllm.server.errors import Problem, note_refusal_of
from cllm.server.http.connections import Connections, too_many_bodies
from cllm.server.http.cycle import Headers, RequestCycle, refusal_of
from cllm.server.http.parser import RefusedError, RequestParser

if TYPE_CHECKING:
    import uvicorn
    from uvicorn.server import ServerState

SLICE = 16_384
"""Bytes that are parsed between two checks of the limits."""
LINGER_S = 2.0
"""How long to keep reading from a client after a refusal. If the connection were closed with unread bytes, the system
would send a reset, and the client might never see the refusal."""
STATUS_LINE_BEGIN = b"HTTP/1.1 "
PROBE_S = 0.05
"""Between the first and the second probe of a client that has closed its half of the connection."""
PROBE_GROWTH = 4
"""Each further interval is this many times as long. Of nine probes the last comes after a quarter of an hour."""


class Connection(asyncio.Protocol):
    """Requests in, responses out, in order."""

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
        self._reader: RequestParser = None  # type: ignore[assignment]
        self._active: RequestCycle | None = None
        """The one being answered."""
        self._queue: deque[RequestCycle] = deque()
        """Pipelined requests behind the active one."""
        self._ahead = bytearray()
        """Bytes behind the active request that are not parsed yet."""
        self._discarding = False
        """Discard further bytes, and close after the pending responses."""
        self._discarded = False
        """Whether anything was discarded."""
        self._idle = False
        """Between two requests: the header timeout starts with the first byte of the next."""
        self._half_closed = False
        self._probes = 0
        self._begun_with = 0
        """Bytes of the status line that probes have already written."""
        self._kept_waiting = False
        """Whether reading the active request's body was paused for lack of room."""
        self._reading = True
        self._writable = asyncio.Event()
        self._writable.set()
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._prober: asyncio.TimerHandle | None = None

    # -- the transport's side ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
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
        self._reader = RequestParser(self._begin, scope, most_head, self._on_head, self._on_end)
        self._server.connections.add(self)  # type: ignore[arg-type]
        self._others.silent(self)
        self._watch(self._limits.header_timeout_s, self._on_late_head)
        self._others.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._discarding or self._transport.is_closing():
            self._discarded = True
            return
        if self._idle:
            self._idle = False
            self._watch(self._limits.header_timeout_s, self._on_late_head)
        self._feed(data)

    def eof_received(self) -> bool:
        """Stay open if a complete request is waiting for its response: the client may have closed only its half."""
        self._half_closed = True
        if self._active is None or not self._active.received:
            return False
        self._probe()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._others.closed(self)
        self._discarding = True
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
        """Finish pending responses, then close."""
        if self._active is None:
            self._close()
        else:
            self._stop_listening()

    def shed(self) -> None:
        """Close now, to make room for another connection."""
        if self._active is not None and not self._active.started:
            message = "Closed to make room: the request was incomplete and server.max_connections was reached."
            self._write_refusal(Problem(503, "unavailable_error", message, code="too_many_connections"))
            self._forget()
            self._close()
        else:
            self.abort()

    def refuse(self, problem: Problem) -> None:
        """Send this error and close, whatever the client still sends."""
        self._discarding = True
        if self._active is None or not self._active.started:
            self._write_refusal(problem)
        self._forget()
        self._active = None
        self._linger()

    # -- the request cycle's side ------------------------------------------------------------------------------

    @property
    def default_headers(self) -> Headers:
        return self._server.default_headers

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def write_head(self, head: bytes) -> None:
        """The first bytes of a response."""
        self._transport.write(head[self._begun_with :])
        self._begun_with = 0

    async def drain(self) -> None:
        """Wait until the client has read enough of what was written."""
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
        """The last byte of the response is written."""
        done = self._active
        assert done is not None
        self._server.total_requests += 1
        if not done.keep_alive:
            self._discarding = True
            if done.received and not self._discarded:
                self._close()
            else:
                self._linger()
        elif done.received:
            self._advance()
        else:
            self._others.sending(self)  # the rest of its body is discarded first

    # -- requests ----------------------------------------------------------------------------------------------

    def _must_wait(self) -> bool:
        """Whether the next bytes belong to a request behind the active one."""
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
                    self._discarded = True
                    self._stop_listening()  # after the responses to the requests before it
                else:
                    self.refuse(refusal.problem)
            if self._discarding:
                return
        self._count_body()

    def _count_body(self) -> None:
        if self._active is not None and not self._active.received:
            self._others.holds(self, self._active.held)

    def _hold(self, data: bytes) -> None:
        if len(self._ahead) + len(data) <= self._limits.max_header_bytes:
            self._ahead += data
        else:
            self._discarded = True
            self._stop_listening()

    def _stop_listening(self) -> None:
        """Close after the responses to complete requests; clients may send the rest again on another connection."""
        self._discarding = True
        self._ahead.clear()
        self._queue = deque(cycle for cycle in self._queue if cycle.received)
        if self._active is None or (self._active.answered and not self._active.received):
            self._linger()
        else:
            (self._queue[-1] if self._queue else self._active).keep_alive = False

    def _begin(self) -> RequestCycle:
        return RequestCycle(self, self._limits.max_body_bytes)

    def _on_head(self, cycle: RequestCycle) -> None:
        if self._active is None:
            self._start(cycle)
        else:
            self._queue.append(cycle)

    def _on_end(self, cycle: RequestCycle) -> None:
        if cycle is self._active:
            self._unwatch()
            self._others.busy(self)
            if cycle.answered:
                self._loop.call_soon(self._advance)  # not now: the parser is still running

    def _start(self, cycle: RequestCycle) -> None:
        self._active = cycle
        self._kept_waiting = False
        if cycle.received:
            self._unwatch()
            self._others.busy(self)
        else:
            self._others.sending(self)
            self._watch(self._limits.body_timeout_s, self._on_late_body)
        task = self._loop.create_task(cycle.run(self._app))
        task.add_done_callback(self._server.tasks.discard)
        self._server.tasks.add(task)
        if self._half_closed:
            self._probes = 0
            self._probe()

    def _advance(self) -> None:
        """Start the next request of a connection that stays open."""
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
        if self._discarding:
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
        """Tell all request cycles that the client is gone."""
        for cycle in (self._active, *self._queue):
            if cycle is not None:
                cycle.disconnect()
        self._queue.clear()
        self._ahead.clear()

    def _probe(self) -> None:
        """Find out whether a client that closed its half is still reading. Only writing tells: a client that is gone
        answers with a reset. So write bytes that change nothing: every response begins with the same ones, and the size
        of a chunk may begin with zeros.
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
            self._close()  # it never sent anything
        else:
            self.refuse(_late("headers", self._limits.header_timeout_s, "server.header_timeout_s"))

    def _on_late_body(self) -> None:
        seconds = self._limits.body_timeout_s
        if self._kept_waiting:
            self.refuse(too_many_bodies(f"Other large requests left no room for this one within {seconds:g} s"))
        else:
            self.refuse(_late("body", seconds, "server.body_timeout_s"))

    def _on_stalled(self) -> None:
        self._others.note_stalled()
        self.abort()

    def _write_refusal(self, problem: Problem) -> None:
        head, request_id = refusal_of(self._active, problem, self.default_headers)
        note_refusal_of(self._described(), problem, request_id)
        self.write_head(head)

    def _described(self) -> str:
        """The request that is refused; of one whose headers are incomplete, only its sender is known."""
        if self._active is not None:
            return f"{self._active.scope['method']} {self._active.scope['path']}"
        client = _address(self._transport.get_extra_info("peername"))
        return "a request" if client is None else f"a request from {client[0]}"

    def _linger(self) -> None:
        """Send EOF, and discard what arrives until the client closes, too."""
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
        """Close once everything is sent, or after the write timeout."""
        self._transport.close()
        self._watch(self._limits.write_timeout_s, self.abort)


def _late(what: str, seconds: float, key: str) -> Problem:
    message = f"The request's {what} did not arrive within {seconds:g} s ({key})."
    return Problem(408, "timeout_error", message, code="slow_request")


def _address(name: Any) -> tuple[str, int] | None:
    """Host and port, which Unix sockets do not have."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) and len(name) >= 2 else None
