"""Programs that run in a process of their own: servers to measure, and the bare library.

Each prints one line of JSON when it is ready, and ends when its standard input does: none outlives the benchmark.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from typing import Any


def say_ready(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def end_with_stdin() -> None:
    """For programs that have a main loop of their own: watch standard input from a thread."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=watch, name="end-with-stdin", daemon=True).start()


def listening_socket() -> tuple[socket.socket, str]:
    """A local socket on any free port, and its address. Who connects before the server runs waits for it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"
