"""The three standard files, which may be closed, have nobody at the other end, or somebody who does not read.

Printing is what programs do without thinking of it. So it is here, once, that none of these cases can hurt.
"""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from typing import TextIO

PATIENCE_S = 1.0
"""How long a server waits for somebody to read its lines before it loses them."""
_PIECE_BYTES = getattr(select, "PIPE_BUF", 512)
"""A pipe that can be written to takes at least this much without blocking."""


def open_missing() -> None:
    """Put the null device where a standard file is closed.

    The next file or socket would get its number otherwise, and whatever is printed would go there.
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


def never_block() -> None:
    """From now on what is printed waits a moment for its reader and is lost then, as it is if nobody is there.

    For a server: one line that somebody else does not read must not keep it from serving, nor from ending.
    """
    for name in ("stdout", "stderr"):
        stream: TextIO = getattr(sys, name)
        with suppress(OSError, ValueError):  # a stream without a file, as in tests
            raw = PatientFile(stream.fileno())
            setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True))


def let_go() -> None:
    """At the end of the program: what nobody reads, now or ever, is lost, so that flushing it cannot block or fail."""
    for number in (1, 2):
        if not _takes_more(number, PATIENCE_S):
            discard(number)


def discard(number: int) -> None:
    """Whatever goes to this file from now on, and what waits in Python's buffers, goes nowhere."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)


class PatientFile(io.RawIOBase):
    """A file to write to that is never waited for longer than `PATIENCE_S`, and not again before it moves."""

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
        """Always says that all was written: there is nobody to whom it could matter."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        with suppress(OSError):
            for start in range(0, len(view), _PIECE_BYTES):
                if not self._write_piece(view[start : start + _PIECE_BYTES]):
                    break
        return len(view)

    def _write_piece(self, piece: memoryview) -> bool:
        while piece:
            self._stuck = not _takes_more(self._number, 0 if self._stuck else PATIENCE_S)
            if self._stuck:
                return False
            with suppress(BlockingIOError):
                piece = piece[os.write(self._number, piece) :]
        return True


def _takes_more(number: int, within_s: float) -> bool:
    """Whether something can be written to the file without blocking, and there is somebody to read it."""
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    events = poll.poll(within_s * 1000)
    return bool(events) and not events[0][1] & (select.POLLERR | select.POLLHUP | select.POLLNVAL)
