"""Small jobs run at once; of the others, none waits for one of another size."""

from __future__ import annotations

import asyncio
import threading

from cllm.work.executor import SizedExecutor


def executor() -> SizedExecutor:
    return SizedExecutor("test", inline=10, short=100)


async def test_a_small_job_runs_on_the_loop_and_others_in_a_thread_of_their_size() -> None:
    tested = executor()
    places = [await tested.run(size, threading.current_thread) for size in (0, 10, 11, 100, 101)]
    main = threading.current_thread()
    assert places[:2] == [main, main]
    assert places[2] is places[3] is not main
    assert places[4] not in (main, places[2])


async def test_short_jobs_pass_any_number_of_long_ones() -> None:
    tested, go = executor(), threading.Event()
    long = [asyncio.ensure_future(tested.run(1000, go.wait)) for _ in range(8)]
    assert await tested.run(50, lambda: "short") == "short"
    assert not any(job.done() for job in long)
    go.set()
    assert all(await asyncio.gather(*long))


async def test_jobs_of_one_lane_keep_their_order() -> None:
    tested, order = executor(), list[int]()
    await asyncio.gather(*(tested.run(50, lambda number=number: order.append(number)) for number in range(20)))
    assert order == list(range(20))


async def test_what_is_cancelled_while_it_waits_is_never_done() -> None:
    tested, go, done = executor(), threading.Event(), list[str]()
    first = asyncio.ensure_future(tested.run(50, go.wait))
    second = asyncio.ensure_future(tested.run(50, lambda: done.append("second")))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])  # the lane hears of it on the loop's next round
    go.set()
    await first
    await tested.run(50, lambda: done.append("third"))
    assert done == ["third"]


async def test_a_failure_is_the_callers() -> None:
    tested = executor()
    for size in (5, 50):
        try:
            await tested.run(size, lambda: 1 // 0)
        except ZeroDivisionError:
            continue
        raise AssertionError("it must be raised")
