"""Processes that fork workers."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cllm
from cllm.work.process import HEADER

Recipe = tuple[str, tuple[Any, ...]]
"""A function as `module:name`, and its arguments: what a parent calls and keeps the result of, for its workers."""

_START = (
    "import json, sys; path, fd, modules = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from cllm.work.process import main; main(fd, modules)"
)
_END_S = 2.0
_CACHE = "CLLM_CACHE_DIR"


class Parent:
    """A process that waits to be told to fork, and ends with its workers when it is closed. May be used from any
    thread."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._control = control
        self._process = process
        self._lock = threading.Lock()

    @property
    def is_first(self) -> bool:
        """Not forked by another parent."""
        return self._process is not None

    @property
    def has_ended(self) -> bool:
        """It never says anything, so what can be read is the end."""
        try:
            return not self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    @classmethod
    def start(cls, modules: Sequence[str]) -> Parent:
        """A new program, not a copy of this one, which has threads and much memory. `modules` are imported before it
        forks. Raises `OSError`."""
        ours, theirs = socket.socketpair()
        home = str(Path(cllm.__file__).resolve().parent.parent)
        path = [each for each in sys.path if each]
        path += [] if home in path else [home]  # an editable installation is found without it
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, json.dumps([path, theirs.fileno(), list(modules)])],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the server, which ends them
            )
        return cls(ours, process)

    def fork_worker(self) -> socket.socket:
        """The connection to a new worker. Raises `OSError`."""
        return self._fork(None)

    def fork_parent(self, recipe: Recipe) -> Parent:
        """One whose workers find what the recipe makes already loaded. Raises `OSError`."""
        return Parent(self._fork(recipe))

    def close(self) -> None:
        self._control.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def _fork(self, recipe: Recipe | None) -> socket.socket:
        ours, theirs = socket.socketpair()
        message = pickle.dumps(recipe)
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [HEADER.pack(len(message))], [theirs.fileno()])
                self._control.sendall(message)
            except OSError:
                ours.close()
                raise
        return ours


def _environment() -> dict[str, str]:
    """Without the server's settings, among which are keys."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CLLM_") or name == _CACHE}


class FirstParent:
    """The one that all others come from. There is one in a process, whoever uses it: starting it takes a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parent: Parent | None = None

    def get(self, modules: Sequence[str]) -> Parent:
        """Raises `OSError`."""
        with self._lock:
            if self._parent is not None and self._parent.has_ended:
                self._parent.close()
                self._parent = None
            if self._parent is None:
                self._parent = Parent.start(modules)
            return self._parent

    def close(self) -> None:
        with self._lock:
            if self._parent is not None:
                self._parent.close()
                self._parent = None

    def leave_to_the_parent(self) -> None:
        """In a forked process: it belongs to the other one."""
        self._lock, self._parent = threading.Lock(), None


FIRST = FirstParent()
atexit.register(FIRST.close)
os.register_at_fork(after_in_child=FIRST.leave_to_the_parent)
