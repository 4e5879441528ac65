"""How requests are sent: so many at a time, or at given times whatever the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
Job = Callable[[], Awaitable[T]]
Task = asyncio.Future[Any]


async def at_most(limit: int, jobs: Iterable[Job[T]]) -> list[T]:
    """Run the jobs in order, `limit` at a time; their results in order. The first failure ends the others."""
    waiting = list(enumerate(jobs))[::-1]
    results: dict[int, T] = {}

    async def worker() -> None:
        while waiting:
            index, job = waiting.pop()
            results[index] = await job()

    tasks = [asyncio.ensure_future(worker()) for _ in range(limit)]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _end(tasks)
    return [results[index] for index in sorted(results)]


async def at_times(jobs: Iterable[tuple[float, Job[Any]]]) -> None:
    """Start each job at its time, in seconds from now, however many still run; return when all are done.

    `jobs` come in the order of their times and are asked for one by one. The first failure ends the others.
    """
    loop = asyncio.get_running_loop()
    begin = loop.time()
    running: set[Task] = set()
    try:
        for seconds, job in jobs:
            while (pause := begin + seconds - loop.time()) > 0:
                await _wait_for_one(running, pause)
            running.add(asyncio.ensure_future(job()))
        while running:
            await _wait_for_one(running, None)
    finally:
        await _end(running)


async def _wait_for_one(running: set[Task], timeout: float | None) -> None:
    """Until one ends, which leaves the set, or the time has passed. Raises what made it fail."""
    if not running:
        await asyncio.sleep(timeout or 0.0)
        return
    done, _ = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    running -= done
    for task in done:
        task.result()


async def _end(tasks: Collection[Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
