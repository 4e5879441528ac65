"""Engines of several models take turns: one at a time, in order, and each with its part of the target."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest

from cllm.config import load_config
from cllm.engine.budget import StepBudget
from cllm.engine.params import SamplingParams
from cllm.engine.time_sharing import TimeSharing
from cllm.llm import AsyncLLM
from cllm.loading.open_model import ModelShare

LIMIT_S = 60.0
"""A guard against hanging, not a demand on speed."""


def test_who_has_waited_longest_is_next() -> None:
    turns, order, waiting = TimeSharing(), list[int](), list[threading.Thread]()
    turns.acquire()
    for number in range(5):

        def compute(number: int = number) -> None:
            with turns.join():
                order.append(number)

        waiting.append(threading.Thread(target=compute))
        waiting[-1].start()
        while len(turns._waiting) <= number:
            pass
    turns.release()
    for thread in waiting:
        thread.join(LIMIT_S)
    assert order == [0, 1, 2, 3, 4]
    turns.acquire()  # it is free again
    turns.release()


def test_a_step_that_fails_passes_the_turn_on() -> None:
    turns = TimeSharing()
    with pytest.raises(ValueError), turns.join():
        raise ValueError
    turns.acquire()


def test_those_that_rest_leave_their_part_to_the_others() -> None:
    turns = TimeSharing()
    first, second, third = turns.join(), turns.join(), turns.join()
    assert first.begin() == (1.0, False)
    second.begin()
    second.answering = True
    assert first.begin() == (0.5, True)
    third.begin()
    assert first.begin() == (1 / 3, True)
    second.rest()
    assert first.begin() == (0.5, False)
    third.leave()
    assert first.begin() == (1.0, False) and len(turns.members) == 2


def learnt() -> StepBudget:
    """A row takes 10 ms, a prompt token 1 ms."""
    budget = StepBudget(inter_token_s=0.1, max_gap_s=0.1, prompt_only_s=1.0, max_tokens=4096)
    for _ in range(20):
        budget.observe(0, 1, 0.010)
        budget.observe(100, 1, 0.120)
    return budget


def test_prompts_are_cut_to_the_part_of_the_target_that_is_left() -> None:
    budget = learnt()
    alone = budget.chunk_tokens(1)
    budget.share(0.5, others_answer=True)
    beside_one = budget.chunk_tokens(1)
    budget.share(0.25, others_answer=True)
    assert alone > beside_one > budget.chunk_tokens(1)
    budget.share(1.0, others_answer=False)
    assert budget.chunk_tokens(1) == alone


def test_a_prompt_alone_does_not_hold_up_another_models_answers() -> None:
    budget = learnt()
    budget.share(0.5, others_answer=False)
    assert budget.chunk_tokens(0) > 500
    budget.share(0.5, others_answer=True)
    assert budget.chunk_tokens(0) <= 50


async def test_two_engines_never_compute_at_once_and_both_advance() -> None:
    turns, computing, steps = TimeSharing(), set[str](), list[str]()
    config = load_config(None, {"backend.type": "fake", "backend.fake.latency_ms": 2.0}, {}).config
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)

    async def run(name: str) -> None:
        async with AsyncLLM(config, share=ModelShare(time_sharing=turns)) as llm:
            backend = llm.executor.parts.backend
            compute = backend.collect

            def collect(ticket: object) -> object:
                computing.add(name)
                steps.append(name)
                assert computing == {name}
                result = compute(ticket)
                computing.remove(name)
                return result

            backend.collect = collect  # type: ignore[method-assign, assignment]
            both.append(name)
            while len(both) < 2:
                await asyncio.sleep(0.001)
            async for _ in llm.submit(f"a prompt for {name}", params):
                pass

    both: list[str] = []
    await asyncio.wait_for(asyncio.gather(run("a"), run("b")), LIMIT_S)
    counted = Counter(steps)
    assert min(counted.values()) >= 30
    together = "".join(steps[min(steps.index("a"), steps.index("b")) :])
    assert together.count("ab") + together.count("ba") >= 30, "they alternate while both have something to do"
    assert turns.members == ()
