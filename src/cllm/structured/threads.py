"""Threads for work that cannot be interrupted. They do not keep the process alive, unlike those of an executor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class DaemonThreads(Generic[T]):
    def __init__(self, count: int, name: str, stack_bytes: int) -> None:
        """They start when they are needed, each with a stack of this size."""
        self._count = count
        self._name = name
        self._stack_bytes = stack_bytes
        self._jobs: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._idle = 0
        self._closed = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Raises `RuntimeError` after `close`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            self._jobs.put((future, work))
            if self._idle < self._jobs.qsize() and self._started < self._count:
                self._start()
        return future

    def close(self) -> None:
        """Cancel what has not begun. Returns at once."""
        with self._lock:
            self._closed = True
            while not self._jobs.empty():
                if (job := self._jobs.get()) is not None:
                    job[0].cancel()
            for _ in range(self._started):
                self._jobs.put(None)

    def _start(self) -> None:
        usual = threading.stack_size(self._stack_bytes)
        try:
            threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True).start()
        finally:
            threading.stack_size(usual)
        self._started += 1

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
            if job is None:
                return
            future, work = job
            if future.set_running_or_notify_cancel():
                _settle(future, work)


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
