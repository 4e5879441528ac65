"""The store's threads: a worker that runs while there is something to do, and a pool for reading and checksumming."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

log = logging.getLogger("cllm.kv.disk")

T = TypeVar("T")


class PoolThread:
    """Calls `work` while it returns 0; otherwise waits as long as it says, or (None) for the next `wake`.

    It runs at normal priority: if it were lower, a thread waiting for the GIL would wait for everything that keeps the
    one that holds it off the CPU.
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
        """Wait at most `timeout`: the disk may hang, and the thread is a daemon."""
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
                log.exception("error in a thread of the K/V store; continuing")
                pause = 1.0


class DaemonPool:
    """Unlike `ThreadPoolExecutor`, all threads start at once, so that `submit` cannot fail halfway, and they are
    daemons, so that a hanging disk does not keep the process from exiting."""

    def __init__(self, count: int, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._count = count
        self._lock = threading.Lock()
        self._stopped = False
        for number in range(count):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._stopped:
                raise RuntimeError("the thread pool is stopped")
            self._tasks.put((future, call, args))
        return future

    def stop(self) -> None:
        """Cancel what has not begun; do not wait for what has."""
        with self._lock:
            self._stopped = True
        try:
            while True:
                task = self._tasks.get_nowait()
                if task is not None and task[0].cancel():
                    task[0].set_running_or_notify_cancel()
        except Empty:
            pass
        for _ in range(self._count):
            self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            _do(*task)
            del task  # free its arguments now, not when the next task comes


def _do(future: Future[T], call: Callable[..., T], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call(*args)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
