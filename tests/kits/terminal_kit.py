"""A terminal with a person at it: a process on a pseudo-terminal, keys that are typed, and what is printed then."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

LIMIT_S = 60.0
"""A guard against hanging, not a demand on speed."""
ENTER, ALT_ENTER, UP, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x1b[A", "\x03", "\x04"


def pasted(text: str) -> str:
    """As terminals send what is pasted, where a program has asked to be told."""
    return f"\x1b[200~{text}\x1b[201~"


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], number: int) -> None:
        self.process = process
        self._number = number
        self._seen = 0
        self.output = ""
        """All that was printed, with its escape sequences."""

    def type(self, keys: str) -> None:
        os.write(self._number, keys.encode())

    def wait_for(self, pattern: str) -> str:
        """Wait until something new is printed that matches; all that was new until then."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, self.output[self._seen :])) is None:
            assert time.monotonic() < deadline, f"{pattern!r} never came: {self.output!r}"
            if not self._read(0.1):
                raise AssertionError(f"it ended before {pattern!r} came: {self.output!r}")
        start, self._seen = self._seen, self._seen + found.end()
        return self.output[start : self._seen]

    def end(self) -> int:
        deadline = time.monotonic() + LIMIT_S
        while self._read(0.1):
            assert time.monotonic() < deadline, f"it does not end: {self.output!r}"
        return self.process.wait(timeout=LIMIT_S)

    def _read(self, within_s: float) -> bool:
        """False: nobody will write any more."""
        if select.select([self._number], [], [], within_s)[0]:
            try:
                data = os.read(self._number, 65536)
            except OSError:
                return False
            self.output += data.decode(errors="replace")
            return bool(data)
        return True


@contextmanager
def at_terminal(command: Sequence[str], environment: Mapping[str, str], *, columns: int = 80) -> Iterator[Terminal]:
    number, other = pty.openpty()
    set_columns(other, columns)
    # No terminal is there that could say where its cursor is.
    own = {**environment, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    process = subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, env=own, preexec_fn=_take_terminal, close_fds=True
    )
    os.close(other)
    try:
        yield Terminal(process, number)
    finally:
        process.kill()
        process.wait()
        os.close(number)


def _take_terminal() -> None:
    """In the child: keys such as Ctrl-C are for this process."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def set_columns(number: int, columns: int) -> None:
    fcntl.ioctl(number, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
