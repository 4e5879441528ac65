"""Threads that do what others hand them, several things at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Helpers:
    """All threads are there from the start, so handing something over cannot fail half-way. They are daemons, which
    those of `ThreadPoolExecutor` are not: a disk that hangs keeps no program from ending."""

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
                raise RuntimeError("these threads take nothing more")
            self._tasks.put((future, call, args))
        return future

    def stop(self) -> None:
        """What nobody has begun is cancelled; what is under way is not waited for."""
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
            del task  # what was handed over goes when it is done, not when more comes


def _do(future: Future[T], call: Callable[..., T], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call(*args)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
