"""The thread that writes log lines, so that no other thread waits for the output.

Lines that cannot be written are queued up to a limit; beyond it they are dropped and counted, and a line says so later.
The thread writes to the file descriptor and not to Python's stream: a blocked stream holds a lock that Python waits for
at exit.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

MAX_WAITING_CHARS = 4 << 20
STOP_S = 1.0
"""How long to wait at exit for the remaining lines to be written."""


class LogWriter:
    """`lost` formats the line that says how many lines were dropped."""

    def __init__(self, stream: TextIO, lost: Callable[[int], str]) -> None:
        self._stream = stream
        try:
            self._file: int | None = stream.fileno()
        except (OSError, ValueError):  # not a real file, as in tests
            self._file = None
        self._lost_line = lost
        self._lines: deque[str] = deque()
        self._waiting_chars = 0
        self._lost = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="cllm-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, line: str) -> None:
        """Never blocks."""
        with self._changed:
            if self._waiting_chars + len(line) > MAX_WAITING_CHARS:
                self._lost += 1
                return
            self._mention_lost()
            self._add(line)
            self._changed.notify()

    def stop(self) -> None:
        """Write the queued lines, for at most `STOP_S`; later lines are not written."""
        with self._changed:
            self._mention_lost()
            self._closing = True
            self._changed.notify()
        self._thread.join(STOP_S)

    def _mention_lost(self) -> None:
        """Add a line where lines are missing."""
        if self._lost:
            note, self._lost = self._lost_line(self._lost), 0
            self._add(note)

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self._waiting_chars += len(line)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closing)
                if not self._lines:
                    return
                line = self._lines.popleft()
            with suppress(OSError, ValueError):  # closed, or a pipe without a reader: the line is lost
                self._write(line + "\n")
            with self._changed:
                # Counted until it is written, so that the queue is bounded.
                self._waiting_chars -= len(line)
                if not self._lines:
                    self._mention_lost()

    def _write(self, text: str) -> None:
        if self._file is None:
            self._stream.write(text)
            self._stream.flush()
            return
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        while data:
            select.select([], [self._file], [])  # another process may have made the shared file non-blocking
            with suppress(BlockingIOError):
                data = data[os.write(self._file, data) :]
