"""What runs in a worker process, and in the parent that forks it.

A parent has one thread and does nothing but fork, so that forking it is safe, quick and costs little memory. It forks
workers, and further parents, which load something first that their workers then share. A worker does one job after
another. The system kills it when a job takes more CPU time than it may, and gives it no more memory than it may have.
Nothing heavy is imported here: every worker would have it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from cllm.errors import CLLMError, InvalidRequestError

HEADER = struct.Struct("!Q")
"""The length of the message that follows."""
MOST_GROWTH = 64 << 20
"""A worker that is larger than it was by more than this, once a job is done, is replaced."""
MOST_LOADING_S = 120.0
"""CPU time that a parent may take to load what its workers need."""
_PR_SET_PDEATHSIG = 1
_ADDRESS_SPACE, _RESIDENT = 0, 1
"""Fields of /proc/self/statm."""

loaded: Any = None
"""What this process's parent loaded for its workers,"""
failure: str | None = None
"""or why it could not."""


def main(fd: int, modules: list[str]) -> None:
    """The first parent, with the socket that tells it what to fork, and what nearly every worker imports."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # what the server ignores or blocks is inherited
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    logging.disable(logging.CRITICAL)  # the server has said it
    for module in modules:
        importlib.import_module(module)
    _be_parent(socket.socket(fileno=fd))


def _be_parent(control: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: the system forgets them at once
    while True:
        try:
            header, fds, *_ = socket.recv_fds(control, HEADER.size, 1)
            recipe = pickle.loads(_receive(control, *HEADER.unpack(header)))
        except (OSError, EOFError, struct.error):
            os._exit(0)  # the server has ended, or needs this no more
        _fork(control, fds, recipe)


def _fork(control: socket.socket, fds: list[int], recipe: tuple[str, tuple[Any, ...]] | None) -> None:
    """If there is no room for another process, whoever asked for it sees that its connection ends."""
    with suppress(OSError):
        if fds and os.fork() == 0:
            control.close()
            _be_child(socket.socket(fileno=fds[0]), recipe)
    for fd in fds:
        os.close(fd)


def _be_child(own: socket.socket, recipe: tuple[str, tuple[Any, ...]] | None) -> NoReturn:
    global loaded, failure
    _die_with_parent()
    if recipe is None:
        _be_worker(own)
    function, arguments = recipe
    try:
        signal.setitimer(signal.ITIMER_PROF, MOST_LOADING_S)
        loaded = find(function)(*arguments)
        signal.setitimer(signal.ITIMER_PROF, 0)
    except Exception as error:
        failure = f"{type(error).__name__}: {_plain(error)}"
    _be_parent(own)


def _be_worker(connection: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # before the server
    size, stays = _pages(_RESIDENT), True
    try:
        send(connection, {"pid": os.getpid(), "failure": failure})
        while stays:
            reply, result = _done(*pickle.loads(receive(connection)))
            stays = not reply.get("retire") and _pages(_RESIDENT) - size <= MOST_GROWTH
            connection.sendall(_framed(json.dumps({**reply, "retire": not stays}).encode()) + _framed(result))
    except (OSError, EOFError):  # nobody listens any more
        pass
    os._exit(0)


def _done(function: str, arguments: tuple[Any, ...], cpu_s: float, memory: int) -> tuple[dict[str, Any], bytes]:
    """How a job went, and its result. What it returns is JSON, or bytes: nothing that this process made is unpickled by
    the server, since a template may have found a way out of its sandbox."""
    began = _cpu_s()
    reply: dict[str, Any]
    result = b""
    try:
        _limit(cpu_s, memory)
        made = find(function)(*arguments)
        result = made if isinstance(made, bytes) else json.dumps(made).encode()
        reply = {"kind": "bytes" if isinstance(made, bytes) else "json"}
    except MemoryError:
        result = b""
        reply = {"kind": "too much memory", "retire": True}
    except InvalidRequestError as error:
        reply = {"kind": "invalid", "message": _plain(error), "param": error.param, "code": error.code}
        reply["numbers"] = error.numbers
    except (CLLMError, ValueError, RecursionError) as error:
        reply = {"kind": "refused", "message": _plain(error)}
    except Exception as error:
        reply = {"kind": "failed", "message": f"{type(error).__name__}: {_plain(error)}"}
    finally:
        _unlimit()
    return {**reply, "cpu_s": _cpu_s() - began}, result


def find(function: str) -> Callable[..., Any]:
    """`module:name`."""
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _limit(cpu_s: float, memory: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process, whatever that is doing
    if sys.platform != "linux":  # elsewhere the address space has no limit, or one that is always passed
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _pages(_ADDRESS_SPACE) + memory
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _unlimit() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    if sys.platform != "linux":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _pages(field: int) -> int:
    """A field of /proc/self/statm, in bytes; 0 where there is no such file."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()
    except OSError:
        return 0


def _plain(error: BaseException) -> str:
    return str(error).encode(errors="replace").decode()[:2000]


def _die_with_parent() -> None:
    """Elsewhere than on Linux a worker ends when it looks for its next job."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# -- messages ----------------------------------------------------------------------------------------------------------


def _framed(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


def send(connection: socket.socket, message: Any) -> None:
    connection.sendall(_framed(json.dumps(message).encode()))


def receive(connection: socket.socket) -> bytes:
    return _receive(connection, *HEADER.unpack(_receive(connection, HEADER.size)))


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = connection.recv_into(view[got:])
        if count == 0:
            raise EOFError
        got += count
    return bytes(data)
