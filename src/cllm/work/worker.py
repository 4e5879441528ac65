"""One worker, from the server's side."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cllm.errors import BackendError, CLLMError, InvalidRequestError, ModelUnavailableError
from cllm.work.process import HEADER

STEP_BACK_S = 0.1
"""A worker that has worked on a job for this long leaves the cores to others when they want them."""
_NICE = 10
_FAILED = "the server cannot read the model's files any more; its log says more"
MOST_RESULT = 64 << 20
"""Bytes of a result. A larger one is none."""


@dataclass(frozen=True, slots=True)
class Limits:
    cpu_s: float
    memory_bytes: int

    @property
    def longest_s(self) -> float:
        """Until a worker that gets no time on any core is given up."""
        return 20 * self.cpu_s + 10


class ExceededError(CLLMError):
    """A job took more time or memory than it may."""

    def __init__(self, message: str, *, early: bool = False) -> None:
        """`early`: its worker ended sooner than a limit of time could have ended it: something else may have."""
        super().__init__(message)
        self.early = early


class NotStartedError(ModelUnavailableError):
    """A worker process ended before it took a job, so that no job is to blame."""


class RefusedError(ValueError):
    """What the job was given makes no sense, as its message says."""


class Worker:
    """Does one job at a time. `dead` says whether it can do another."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._process: _Process | None = None
        self.dead = False
        self.cpu_s = 0.0
        """What the latest job took."""

    async def do(self, function: str, arguments: tuple[Any, ...], limits: Limits) -> Any:
        """What the function returns. Raises `InvalidRequestError` or `RefusedError` as it does, and `ExceededError` if
        it takes more than it may."""
        loop, began = asyncio.get_running_loop(), time.monotonic()
        timers = [loop.call_later(limits.longest_s, self.stop)]
        try:
            process = self._process or await self._begin()
            message = pickle.dumps((function, arguments, limits.cpu_s, limits.memory_bytes))
            timers.append(loop.call_later(STEP_BACK_S, process.step_back))
            await loop.sock_sendall(self._connection, HEADER.pack(len(message)) + message)
            reply = json.loads(await self._receive())
            result = await self._receive()
        except BaseException as error:
            took = time.monotonic() - began
            self.cpu_s = min(took, limits.cpu_s)
            self.kill()
            if isinstance(error, EOFError | OSError):
                raise ExceededError(_beyond(limits), early=took < limits.cpu_s) from error
            raise
        finally:
            for timer in timers:
                timer.cancel()
        self.cpu_s = reply["cpu_s"]
        if reply["retire"] or process.stepped_back:
            self.kill()
        return _result(reply, result, limits)

    async def _begin(self) -> _Process:
        try:
            hello = json.loads(await self._receive())
        except (EOFError, OSError) as error:
            raise NotStartedError("a worker process ended before its first job", 1.0) from error
        self._process = _Process(hello["pid"])
        if hello["failure"] is not None:
            raise ModelUnavailableError(
                f"a worker process could not load what it needs: {hello['failure']}", 1.0, _FAILED
            )
        return self._process

    @property
    def has_ended(self) -> bool:
        """Whether its process ended while it had no job."""
        try:
            return self._process is not None and not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def stop(self) -> None:
        """End its job, if it has one: `do` then raises `ExceededError`. From any thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """While it has no job, or within `do`: the event loop must not look at its connection any more."""
        if self.dead:
            return
        self.dead = True
        self._connection.close()
        if self._process is not None:
            self._process.kill()

    async def _receive(self) -> bytes:
        size = HEADER.unpack(await self._read(HEADER.size))[0]
        if size > MOST_RESULT:
            raise EOFError
        return await self._read(size)

    async def _read(self, size: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < size:
            piece = await loop.sock_recv(self._connection, min(size - len(data), 1 << 18))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


class _Process:
    """Its parent forgets it when it ends, so that its number may become another's: a file descriptor cannot."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._handle: int | None = None
        self.stepped_back = False
        if sys.platform == "linux":
            with suppress(OSError):
                self._handle = os.pidfd_open(pid)

    def step_back(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._pid, _NICE)
            self.stepped_back = True

    def kill(self) -> None:
        if self._handle is None:
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
            return
        with suppress(OSError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        os.close(self._handle)


def _result(reply: dict[str, Any], result: bytes, limits: Limits) -> Any:
    kind = reply["kind"]
    if kind in ("json", "bytes"):
        return result if kind == "bytes" else json.loads(result)
    if kind == "invalid":
        raise InvalidRequestError(reply["message"], reply["param"], reply["code"], reply["numbers"])
    if kind == "refused":
        raise RefusedError(reply["message"])
    if kind == "too much memory":
        raise ExceededError(_beyond(limits))
    raise BackendError(f"internal error: {reply['message']}")


def _beyond(limits: Limits) -> str:
    return f"takes more than {limits.cpu_s:g} s of CPU time, or more than {limits.memory_bytes >> 20} MiB of memory"
