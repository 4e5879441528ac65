"""Threads for work that cannot be interrupted. They do not keep the process alive, unlike those of an executor."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MOST_GIVEN_UP = 8
"""Threads that work on although nobody waits for them. Others take their places; with more, those would be too many."""
LAST_WAIT_S = 2.0
"""How long the end of the process waits for work under way."""
_LEAST_PRIORITY = 19


class Job(Generic[T]):
    """One piece of work."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.result: Future[T] = Future()
        self.started: float | None = None
        """When it began, by `time.monotonic`."""
        self.is_over = False
        """Its thread is done with it, or nobody waits for it."""
        self.given_up = False
        self._work: Callable[[], T] | None = work
        self._thread_id: int | None = None

    def compute(self) -> Callable[[], None]:
        """Do it. What is returned tells those who wait."""
        work, self._work = self._work, None
        if work is None or not self.result.set_running_or_notify_cancel():
            return _nothing
        self.started, self._thread_id = time.monotonic(), threading.get_native_id()
        try:
            result = work()
        except BaseException as error:
            return partial(self.result.set_exception, error)
        return partial(self.result.set_result, result)

    def step_back(self) -> None:
        """Have its thread compute only when nothing else wants to, where the system knows priorities of threads."""
        if self._thread_id is not None and sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._thread_id, _LEAST_PRIORITY)


class DaemonThreads(Generic[T]):
    def __init__(self, count: int, name: str, stack_bytes: int) -> None:
        """They start when they are needed, each with a stack of this size."""
        self._count = count
        self._name = name
        self._stack_bytes = stack_bytes
        self._jobs: SimpleQueue[Job[T] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        """Those that take jobs."""
        self._unfinished = 0
        """Jobs for them."""
        self._given_up = 0
        self._closed = False
        _ALL.add(self)

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Raises `RuntimeError` after `close`."""
        job = Job(work)
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            self._jobs.put(job)
            self._unfinished += 1
            self._start_if_needed()
        return job

    def give_up(self, job: Job[T]) -> None:
        """Nobody waits for a job that has begun. Its thread ends with it; another one takes its place meanwhile."""
        with self._lock:
            if job.is_over or self._given_up >= MOST_GIVEN_UP:
                return
            job.is_over = job.given_up = True
            self._given_up += 1
            self._threads -= 1
            self._unfinished -= 1
            self._start_if_needed()
            job.step_back()  # its thread cannot end before the lock is free

    def close(self) -> None:
        """Cancel what has not begun. Returns at once."""
        with self._lock:
            self._closed = True
            while not self._jobs.empty():
                if (job := self._jobs.get()) is not None:
                    job.result.cancel()
                    self._unfinished -= 1
            for _ in range(self._threads):
                self._jobs.put(None)

    @property
    def unfinished(self) -> int:
        """Jobs that wait or run, without those given up."""
        return self._unfinished

    @property
    def busy(self) -> bool:
        return self._unfinished + self._given_up > 0

    def _start_if_needed(self) -> None:
        if self._closed or self._threads >= min(self._count, self._unfinished):
            return
        usual = threading.stack_size(self._stack_bytes)
        try:
            threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True).start()
        finally:
            threading.stack_size(usual)
        self._threads += 1

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            tell = job.compute()
            with self._lock:
                job.is_over = True
                if job.given_up:
                    self._given_up -= 1
                else:
                    self._unfinished -= 1
            tell()
            if job.given_up:
                return
            del job, tell  # and what it gave


def _nothing() -> None:
    """Nobody waits."""


_ALL: weakref.WeakSet[DaemonThreads[Any]] = weakref.WeakSet()


def _end_beside_busy_threads() -> None:
    """A thread that comes back from a library written in another language finds no interpreter any more, and crashes
    the process. So the end waits for it a while, and then happens without the interpreter's."""
    until = time.monotonic() + LAST_WAIT_S
    while any(each.busy for each in _ALL):
        if time.monotonic() > until:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(1 if hasattr(sys, "last_value") else 0)
        time.sleep(0.01)


atexit.register(_end_beside_busy_threads)
