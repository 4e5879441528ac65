"""Long work on the event loop lets other callbacks run between its pieces, and now and then other threads."""

from __future__ import annotations

import asyncio

import pytest

from cllm.server.http import response
from cllm.server.http.response import Turns


async def test_work_of_some_milliseconds_is_followed_by_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, list[float]()
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(response.time, "perf_counter", lambda: now)
    monkeypatch.setattr(response.asyncio, "sleep", noted)
    turns = Turns()
    for _ in range(20):
        now += 0.001
        await turns.give()
    rests = [seconds for seconds in slept if seconds]
    assert len(slept) == 20 and 3 <= len(rests) <= 6
    assert min(rests) >= 0.002, "a thread that waits must have time to wake up"
