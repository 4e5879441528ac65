"""`cllm bench window`: does it count tokens right, and judge what it saw?"""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from cllm_bench.errors import BenchError
from cllm_bench.workloads import WORKLOADS
from cllm_bench.workloads.base import Setup
from cllm_bench.workloads.window import Window, _Reading, figures_of


def event(tokens: list[int], done: bool = False, **more: int) -> bytes:
    return b"data: " + json.dumps({"token": tokens, "done": done, **more}).encode() + b"\n\n"


def test_tokens_are_counted_however_they_come() -> None:
    said: list[int] = []
    reading = _Reading(os.getpid(), 4, said.append)
    first, rest = event([1, 2])[:9], event([1, 2])[9:]
    reading.take(first, 1.0)
    assert reading.tokens == 0
    reading.take(rest + event([3]), 2.0)
    reading.take(event([4]), 3.0)
    reading.take(event([], done=True, generated_tokens=6) + b"data: [DONE]\n\n", 4.0)
    assert reading.times == [2.0, 2.0, 2.0, 3.0, 4.0, 4.0]
    assert said == [4, 6] and reading.resident[0][1] > 1


def test_speed_is_that_of_the_end_beside_that_behind_the_first_drop() -> None:
    reading = _Reading(os.getpid(), 100, lambda count: None)
    # 10 tokens a second while the context fills, then 5, and 4 in the last tenth.
    reading.times = [n / 10 for n in range(101)]
    reading.times += [10 + n / 5 for n in range(1, 800)]
    reading.times += [reading.times[-1] + n / 4 for n in range(1, 101)]
    reading.resident = [(100, 400.0), (500, 700.0), (1000, 404.0)]
    found = figures_of(reading, 100, 50)
    assert found["early_tokens_per_s"] == pytest.approx(5) and found["late_tokens_per_s"] == pytest.approx(4)
    assert found["speed_kept"] == pytest.approx(0.8)
    assert found["growth_percent"] == pytest.approx(1) and found["resident_mb"] == 404
    assert found["worst_gap_ms"] == pytest.approx(250)


def test_a_stream_that_is_too_short_says_so() -> None:
    short = Window(tokens=1000)
    with pytest.raises(BenchError, match="1000 tokens are too few to go round a context of 8192"):
        asyncio.run(short.one_repeat(Setup("smollm2", lambda text: [], 2, 1), 0))


def test_the_usual_sizes_fill_the_context() -> None:
    (usual,) = WORKLOADS["window"]
    assert isinstance(usual, Window)
    assert usual.keep + usual.recent + 256 == usual.context
    quick = usual.quick()
    assert quick.tokens >= quick.context + 2 * quick.early_tokens
