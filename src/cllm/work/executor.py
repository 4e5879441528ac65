"""Threads for work that would block the event loop; small jobs never wait for large ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cllm.errors import ShuttingDownError

T = TypeVar("T")


class SizedExecutor:
    """Runs the smallest jobs at once, on the event loop, and others in one of two threads by size, in order of arrival.
    So no job waits for a much larger one, none starves, and at most two cores are used."""

    def __init__(self, name: str, *, inline: int, short: int) -> None:
        """`inline`, `short`: the largest jobs that run at once, and in the thread for short ones."""
        self._inline = inline
        self._short = short
        # Threads start with the first job.
        self._pools = [ThreadPoolExecutor(1, f"cllm-{name}-{size}") for size in ("short", "long")]

    async def run(self, size: int, work: Callable[[], T]) -> T:
        if size <= self._inline:
            return work()
        pool = self._pools[size > self._short]
        try:
            future = pool.submit(work)
        except RuntimeError as error:
            raise ShuttingDownError("the model was closed meanwhile") from error
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads once they have finished their queues."""
        for pool in self._pools:
            pool.shutdown(wait=False)
