"""Commands of `cllm` in processes of their own, forked from one that has imported everything: that saves each of them
a second of computing.

A process is as `python -m cllm` would be, but for what only a new interpreter shows, such as standard files that are
closed, the locale, what is imported, or how long it takes to start. `python fork_server.py SOCKET` is the one that
forks; it has a single thread and no event loop. A `Forked` is what tests hold of a process, in place of a
`subprocess.Popen`.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import cllm.cli

PRELOADED = ("cllm.cli.http_server", "cllm.cli.chat.session", "cllm.cli.generate", "cllm.loading.open_model", "uvloop")
STATUS = struct.Struct("i")
MOST_BYTES = 1 << 16
"""Of one request: its arguments and its environment."""


# -- in the process that forks -----------------------------------------------------------------------------------------


class Child(NamedTuple):
    wanted: Mapping[str, Any]
    files: Sequence[int]


def fork_on_request(control: socket.socket) -> Child | None:
    """Returns in each process that is forked, and when the other end is closed. Tells the id of each process, and at
    its end its status."""
    statuses: dict[int, int] = {}
    awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    while True:
        ready, _, _ = select.select([control, awake], [], [])
        if awake in ready:
            os.read(awake, 4096)
            _report_ended(statuses)
        if control in ready:
            message, files, flags, _ = socket.recv_fds(control, MOST_BYTES, 3)
            assert not flags & socket.MSG_TRUNC, "the arguments and the environment are too long"
            if not message:
                return None
            pid = _fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for number in (control.detach(), awake, wake, *statuses.values(), files[2]):
                    os.close(number)
                return Child(json.loads(message), files[:2])
            for number in files[:2]:
                os.close(number)
            statuses[pid] = files[2]
            control.send(STATUS.pack(pid))


def _fork() -> int:
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with several threads cannot be forked safely"
    return os.fork()


def _report_ended(statuses: dict[int, int]) -> None:
    for pid in list(statuses):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            number = statuses.pop(pid)
            with suppress(OSError):  # the test does not want to know any more
                os.write(number, STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(number)


def become(child: Child) -> None:
    """What a new process would find: its standard files, its environment, its limits and its signals."""
    for number, file in enumerate(child.files, start=1):
        os.dup2(file, number)
        os.close(file)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    wanted = child.wanted
    os.environ.clear()
    os.environ.update(wanted["environment"])
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in wanted["ignoring"]:
        signal.signal(number, signal.SIG_IGN)
    if wanted["files"] is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted["files"], wanted["files"]))
    sys.argv = ["cllm", *wanted["arguments"]]


def main() -> None:
    sys.path.pop(0)  # this directory, which a command does not see
    for name in PRELOADED:
        import_module(name)
    child = fork_on_request(socket.socket(fileno=int(sys.argv[1])))
    if child is not None:
        become(child)
        cllm.cli.main()


# -- in the process of the tests ---------------------------------------------------------------------------------------


class Forked:
    """A process that was forked, with what tests ask of a `subprocess.Popen` whose pipes are text. It has no input."""

    def __init__(self, pid: int, status: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = open(stdout)  # noqa: SIM115
        self.stderr = open(stderr)  # noqa: SIM115
        self._status: int | None = status

    def __enter__(self) -> Forked:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()

    def poll(self) -> int | None:
        return self._end_within(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._end_within(timeout) is None:
            raise subprocess.TimeoutExpired("cllm", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end_within(self, timeout: float | None) -> int | None:
        if self._status is not None and select.select([self._status], [], [], timeout)[0]:
            status = os.read(self._status, STATUS.size)
            assert status, "the process that forks has ended"
            (self.returncode,) = STATUS.unpack(status)
            os.close(self._status)
            self._status = None
        return self.returncode


class ForkServer:
    """Started at its first use, for all tests of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        files: int | None = None,
        ignoring: Sequence[signal.Signals] = (),
    ) -> Forked:
        """`files`: most open files; `ignoring`: signals that are switched off."""
        wanted = {
            "arguments": arguments,
            "environment": dict(environment),
            "files": files,
            "ignoring": [int(number) for number in ignoring],
        }
        with ExitStack() as theirs:
            status, status_end = _pipe(theirs)
            stdout, stdout_end = _pipe(theirs)
            stderr, stderr_end = _pipe(theirs)
            pid = self._ask(json.dumps(wanted).encode(), [stdout_end, stderr_end, status_end])
        return Forked(pid, status, stdout, stderr)

    def _ask(self, message: bytes, files: Sequence[int]) -> int:
        with self._lock:
            if self._control is None:
                self._control, self._process = _start()
                atexit.register(self._end)
            socket.send_fds(self._control, [message], files)
            answer = self._control.recv(STATUS.size)
            assert answer, "the process that forks has ended"
            pid: int = STATUS.unpack(answer)[0]
            return pid

    def _end(self) -> None:
        assert self._control is not None and self._process is not None
        self._control.close()
        self._process.wait()


def _pipe(theirs: ExitStack) -> tuple[int, int]:
    """A pipe whose end for writing is closed here in the end."""
    ours, end = os.pipe()
    theirs.callback(os.close, end)
    return ours, end


def _start() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # One thread for BLAS: others could not be forked.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CLLM_")}
        environment["OPENBLAS_NUM_THREADS"] = "1"
        command = [sys.executable, str(Path(__file__)), str(theirs.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
    return ours, process


fork_server = ForkServer()

if __name__ == "__main__":
    main()
