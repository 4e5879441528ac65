"""Whose job is next: fair between keys, and nobody is forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.work.turns import HALF_LIFE_S, MOST, MOST_REMEMBERED, Turns


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_at_most_so_many_at_once_and_first_come_first_served_within_a_key() -> None:
    turns, order = Turns(2), list[int]()

    async def job(number: int) -> None:
        await turns.begin("key", 0.0)
        order.append(number)

    tasks = [asyncio.ensure_future(job(number)) for number in range(5)]
    await settle()
    assert order == [0, 1] and turns.running == 2 and turns.waiting == 3
    turns.end("key", 1.0, 1.0)
    await settle()
    assert order == [0, 1, 2]
    for _ in range(4):
        turns.end("key", 1.0, 1.0)
        await settle()
    await asyncio.gather(*tasks)
    assert order == [*range(5)] and turns.running == 0


async def test_a_key_that_has_none_waits_for_no_other() -> None:
    turns = Turns(1)
    await turns.begin("greedy", 0.0)
    waiting = asyncio.ensure_future(turns.begin("greedy", 0.0))
    await settle()
    await asyncio.wait_for(turns.begin("modest", 0.0), 5)
    assert turns.running == 2 and not waiting.done()
    waiting.cancel()


async def test_with_many_keys_the_cheapest_goes_first() -> None:
    turns = Turns(1)
    for number in range(MOST):
        await turns.begin(f"k{number}", 0.0)
    order: list[str] = []

    async def ask(key: str) -> None:
        await turns.begin(key, 0.0)
        order.append(key)

    spent = {"dear": 5.0, "cheap": 0.1, "middling": 1.0}
    for key, cost in spent.items():  # what they have cost before
        turns._accounts.setdefault(key, type(turns._accounts["k0"])()).add(cost, 0.0)
    tasks = [asyncio.ensure_future(ask(key)) for key in spent]
    await settle()
    for number in range(3):
        turns.end(f"k{number}", 0.0, 0.0)
        await settle()
    await asyncio.gather(*tasks)
    assert order == ["cheap", "middling", "dear"]


async def test_what_was_long_ago_counts_little() -> None:
    turns = Turns(1)
    await turns.begin("key", 0.0)
    turns.end("key", 8.0, 0.0)
    assert turns._accounts["key"].cost_at(3 * HALF_LIFE_S) == pytest.approx(1.0)


async def test_keys_that_are_gone_are_forgotten() -> None:
    turns = Turns(1)
    for number in range(2000):
        await turns.begin(f"k{number}", 0.0)
        turns.end(f"k{number}", 1.0, 0.0)
    assert len(turns._accounts) <= MOST_REMEMBERED


@given(st.data())
def test_whatever_comes_and_goes_turns_are_neither_lost_nor_given_twice(data: Any) -> None:
    async def main() -> None:
        count = data.draw(st.integers(1, 3))
        turns, waiting, running = Turns(count), list[tuple[str, Any]](), list[str]()
        for now in range(data.draw(st.integers(1, 40))):
            act = data.draw(st.sampled_from(["begin", "cancel", "end", "end and cancel"]))
            if act == "begin":
                key = data.draw(st.sampled_from("abcdefghijkl"))
                waiting.append((key, asyncio.ensure_future(turns.begin(key, float(now)))))
                await settle()
            if act.startswith("end") and running:
                turns.end(running.pop(data.draw(st.integers(0, len(running) - 1))), 0.5, float(now))
            if act.endswith("cancel") and waiting:
                key, task = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
                task.cancel()
            await settle()
            running += [key for key, task in waiting if task.done()]
            waiting = [(key, task) for key, task in waiting if not task.done()]
            assert turns.running == len(running) and turns.waiting == len(waiting)
            assert len(running) <= MOST
            waits = {key for key, _ in waiting}
            assert not waits or len(running) >= count, "whoever waits, waits for somebody"
            assert not (waits - set(running)) or len(running) == MOST, "a key without a turn waits for no other"
        for _, task in waiting:
            task.cancel()

    asyncio.run(main())
