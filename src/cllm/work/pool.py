"""Runs jobs in worker processes: in turn, within limits, and only as long as somebody waits for them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cllm.config.server import WorkConfig
from cllm.errors import InvalidRequestError, ModelUnavailableError, OverloadedError, ShuttingDownError
from cllm.work.parents import FIRST, Parent, Recipe
from cllm.work.turns import OWNER, Owner, Turns, for_nobody, while_wanted
from cllm.work.worker import ExceededError, Limits, NotStartedError, RefusedError, Worker

log = logging.getLogger("cllm")

LOOK_S = 0.5
"""How often a blocking caller looks whether its event loop is still there."""
IDLE_S = 60.0
"""Workers that have had no job for so long end."""


@dataclass(frozen=True, slots=True)
class Job:
    kind: str
    """What metrics call it."""
    function: str
    """`module:name`. It returns what JSON can hold, or bytes."""
    arguments: tuple[Any, ...]
    recipe: Recipe | None = None
    """What must be loaded where it runs."""
    limits: Limits | None = None
    """If not those of the settings."""


@dataclass(slots=True, eq=False)
class _Kind:
    """Workers for which the same has been loaded."""

    parent: Parent
    idle: list[Worker] = field(default_factory=list)
    busy: int = 0
    used: float = field(default_factory=time.monotonic)


class Workers:
    """Used on one event loop; `run_blocking` from other threads. Processes start when they are first needed."""

    def __init__(self, config: WorkConfig, modules: Sequence[str] = ()) -> None:
        """`modules`: what nearly every job needs."""
        self._modules = modules
        self._limits = Limits(config.max_cpu_s, config.max_memory_mb << 20)
        self._most_waiting = config.max_waiting
        self._turns = Turns(config.processes)
        self._kept = config.processes
        """Idle workers of each kind that wait for their next job."""
        self._kinds: dict[Recipe | None, _Kind] = {}
        self._busy: set[Worker] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tidying: asyncio.TimerHandle | None = None
        self._closed = False
        self.seconds: dict[str, float] = defaultdict(float)
        """CPU time of each kind of job,"""
        self.jobs: Counter[tuple[str, str]] = Counter()
        """and how many of each kind ended in which way."""
        self.key_seconds: dict[str, float] = defaultdict(float)
        """CPU time for each key."""

    def open(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Take the event loop, the running one by default, for `run_blocking`."""
        self._loop = loop or asyncio.get_running_loop()

    async def run(self, job: Job) -> Any:
        """What the job's function returns, for the request that the running code serves. Raises `RefusedError` or
        `InvalidRequestError` if the function does, `ExceededError` if it takes too much, and `OverloadedError` if too
        many jobs of the key wait."""
        owner = OWNER.get()
        if self._turns.waiting_of(owner.key) >= self._most_waiting:
            raise OverloadedError(f"{self._most_waiting} jobs of this key wait already (work.max_waiting)")
        return await while_wanted(owner, self._run(job, owner))

    def run_blocking(self, job: Job) -> Any:
        """From another thread than the event loop's, and for nobody in particular."""
        assert self._loop is not None
        loop, outcome = self._loop, Future[Any]()

        def begin() -> None:
            task = loop.create_task(for_nobody(self.run(job)))
            task.add_done_callback(partial(_tell, outcome))

        try:
            loop.call_soon_threadsafe(begin)
            while True:
                with suppress(TimeoutError, FutureTimeoutError):
                    return outcome.result(LOOK_S)
                if loop.is_closed():
                    break
        except RuntimeError as error:
            if not loop.is_closed():
                raise
            raise _closed() from error
        raise _closed()

    @property
    def waiting(self) -> int:
        return self._turns.waiting

    @property
    def running(self) -> int:
        return self._turns.running

    def forget(self, recipe: Recipe | None) -> None:
        """End the processes that have this loaded."""
        if (kind := self._kinds.pop(recipe, None)) is not None:
            self._end(kind)

    def close(self) -> None:
        """End all processes, whatever they do."""
        self._closed = True
        if self._tidying is not None:
            self._tidying.cancel()
        for worker in list(self._busy):
            worker.stop()
        for kind in list(self._kinds.values()):
            self._end(kind)
        self._kinds.clear()

    async def _run(self, job: Job, owner: Owner) -> Any:
        await self._turns.begin(owner.key, time.monotonic())
        cost = [0.0]
        outcome = "failed"
        try:
            result = await self._try_twice(job, cost)
            outcome = "done"
            return result
        except ExceededError:
            outcome = "exceeded"
            raise
        except (RefusedError, InvalidRequestError):
            outcome = "refused"
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self.seconds[job.kind] += cost[0]
            self.key_seconds[owner.key] += cost[0]
            self.jobs[job.kind, outcome] += 1
            self._turns.end(owner.key, cost[0], time.monotonic())

    async def _try_twice(self, job: Job, cost: list[float]) -> Any:
        """A worker may be ended by something else than its job, such as a system that is short of memory."""
        try:
            return await self._try(job, cost)
        except NotStartedError:
            pass
        except ExceededError as error:
            if not error.early:
                raise
        return await self._try(job, cost)

    async def _try(self, job: Job, cost: list[float]) -> Any:
        kind, worker = self._take(job.recipe)
        self._busy.add(worker)
        kind.busy += 1
        try:
            return await worker.do(job.function, job.arguments, job.limits or self._limits)
        except ExceededError as error:
            if self._closed:
                raise _closed() from error
            if kind.parent.has_ended:
                self._forget(job.recipe, kind)
            raise
        except ModelUnavailableError as error:  # another parent may have more luck
            log.warning("%s", error)
            self._forget(job.recipe, kind)
            raise
        finally:
            cost[0] += worker.cpu_s
            self._busy.discard(worker)
            self._give_back(kind, worker)

    def _forget(self, recipe: Recipe | None, kind: _Kind) -> None:
        if self._kinds.get(recipe) is kind:
            self.forget(recipe)

    def _take(self, recipe: Recipe | None) -> tuple[_Kind, Worker]:
        if self._closed:
            raise _closed()
        try:
            kind = self._kind(recipe)
            while kind.idle:
                worker = kind.idle.pop()
                if not worker.has_ended:
                    return kind, worker
                worker.kill()
            return kind, Worker(kind.parent.fork_worker())
        except OSError:  # its parent has ended: somebody killed it
            self.forget(recipe)
        try:
            kind = self._kind(recipe)
            return kind, Worker(kind.parent.fork_worker())
        except OSError as error:
            raise ModelUnavailableError(f"a worker process cannot be started: {error}", 1.0) from error

    def _kind(self, recipe: Recipe | None) -> _Kind:
        """Raises `OSError`."""
        if (kind := self._kinds.get(recipe)) is not None:
            return kind
        first = FIRST.get(self._modules)
        kind = self._kinds[recipe] = _Kind(first if recipe is None else first.fork_parent(recipe))
        if self._tidying is None:
            self._tidying = asyncio.get_running_loop().call_later(IDLE_S, self._tidy)
        return kind

    def _give_back(self, kind: _Kind, worker: Worker) -> None:
        kind.busy -= 1
        kind.used = time.monotonic()
        if worker.dead:
            return
        if kind not in self._kinds.values() or len(kind.idle) >= self._kept:
            worker.kill()
        else:
            kind.idle.append(worker)

    def _tidy(self) -> None:
        """End what has not been used for a while."""
        self._tidying = asyncio.get_running_loop().call_later(IDLE_S, self._tidy)
        for recipe, kind in list(self._kinds.items()):
            if not kind.busy and time.monotonic() - kind.used > IDLE_S:
                self.forget(recipe)

    @staticmethod
    def _end(kind: _Kind) -> None:
        for worker in kind.idle:
            worker.kill()
        kind.idle.clear()
        if not kind.parent.is_first:
            kind.parent.close()


def _tell(outcome: Future[Any], task: asyncio.Task[Any]) -> None:
    error = _closed() if task.cancelled() else task.exception()
    if error is None:
        outcome.set_result(task.result())
    else:
        outcome.set_exception(error)


def _closed() -> ShuttingDownError:
    return ShuttingDownError("the server is shutting down")


@contextmanager
def blocking_workers(config: WorkConfig, modules: Sequence[str] = ()) -> Iterator[Workers]:
    """For a program without an event loop."""
    loop, workers = asyncio.new_event_loop(), Workers(config, modules)
    workers.open(loop)
    thread = threading.Thread(target=loop.run_forever, name="cllm-workers", daemon=True)
    thread.start()
    try:
        yield workers
    finally:
        loop.call_soon_threadsafe(workers.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
