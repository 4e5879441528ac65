"""Work that would hold up the event loop, in threads of its own: large jobs never stand in front of small ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Lanes:
    """Small jobs run at once, on the event loop. Others wait in one of two lanes, each with a thread and in order of
    arrival: so nobody waits for a job of another size, nobody is passed over, and no more than two cores are taken.
    """

    def __init__(self, name: str, *, inline: int, short: int) -> None:
        """`inline` and `short`: the largest sizes of a job that runs at once, and of one for the short lane."""
        self._inline = inline
        self._short = short
        # Their threads start with the first job.
        self._lanes = [ThreadPoolExecutor(1, f"cllm-{name}-{lane}") for lane in ("short", "long")]

    async def run(self, size: int, work: Callable[[], T]) -> T:
        if size <= self._inline:
            return work()
        lane = self._lanes[size > self._short]
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        """Let the threads go once they have done what waits."""
        for lane in self._lanes:
            lane.shutdown(wait=False)
