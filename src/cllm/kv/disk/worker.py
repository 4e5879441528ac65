"""A thread that does one thing after another, or, for tests, the same done by hand."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("cllm.kv.disk")


class Worker:
    """Calls `work` while it returns 0, waits for what it returns otherwise: seconds, or None for the next `wake`.

    Its priority is no lower than others': who waits for the interpreter would wait for all who keep the processor from
    the one that has it.
    """

    def __init__(self, name: str, work: Callable[[], float | None]) -> None:
        self._work = work
        self._wanted = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wanted.set()

    def stop(self, timeout: float) -> None:
        """It is a daemon: if the disk hangs, nobody waits for it for ever."""
        self._stopping = True
        self._wanted.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        pause: float | None = 0.0
        while not self._stopping:
            if pause is None or pause > 0:
                self._wanted.wait(pause)
            self._wanted.clear()
            try:
                pause = self._work()
            except Exception:
                log.exception("the K/V store's thread failed, and goes on")
                pause = 1.0
