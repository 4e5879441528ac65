"""Makes stdin, stdout and stderr safe to use: they may be closed, or a pipe that nobody reads."""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from typing import TextIO

WRITE_TIMEOUT_S = 1.0
"""How long a server waits for a reader before it drops its output."""
_PIECE_BYTES = getattr(select, "PIPE_BUF", 512)
"""A writable pipe takes at least this much without blocking."""


def open_closed() -> None:
    """Open the null device in place of standard files that are closed.

    Otherwise the next file or socket would get that descriptor, and receive whatever is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            found = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            if found != number:
                os.dup2(found, number)
                os.close(found)
        if getattr(sys, name) is None:
            stream = open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def limit_blocking() -> None:
    """From now on, printing waits a moment for a reader and then drops the output.

    For servers: an unread line must not stop them from serving or from shutting down.
    """
    for name in ("stdout", "stderr"):
        stream: TextIO = getattr(sys, name)
        with suppress(OSError, ValueError):  # a stream without a file, as in tests
            raw = TimeoutWriter(stream.fileno())
            setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True))


def discard_unread() -> None:
    """At exit: drop output that nobody reads, so that flushing cannot block or fail."""
    for number in (1, 2):
        if not _takes_more(number, WRITE_TIMEOUT_S):
            discard(number)


def discard(number: int) -> None:
    """Drop everything written to this descriptor, including what is still in Python's buffers."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)


class TimeoutWriter(io.RawIOBase):
    """Waits at most `WRITE_TIMEOUT_S` for its reader, and then not at all until the reader reads again."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._stuck = False

    def fileno(self) -> int:
        return self._number

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: object, /) -> int:
        """Always reports success: no caller could do anything about lost output."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        with suppress(OSError):
            for start in range(0, len(view), _PIECE_BYTES):
                if not self._write_piece(view[start : start + _PIECE_BYTES]):
                    break
        return len(view)

    def _write_piece(self, piece: memoryview) -> bool:
        while piece:
            self._stuck = not _takes_more(self._number, 0 if self._stuck else WRITE_TIMEOUT_S)
            if self._stuck:
                return False
            with suppress(BlockingIOError):
                piece = piece[os.write(self._number, piece) :]
        return True


def _takes_more(number: int, within_s: float) -> bool:
    """Whether the descriptor has a reader and can be written to without blocking."""
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    events = poll.poll(within_s * 1000)
    return bool(events) and not events[0][1] & (select.POLLERR | select.POLLHUP | select.POLLNVAL)
