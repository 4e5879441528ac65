"""`cllm bench structured`: a run of it without a model."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cllm_bench.figures import OURS
from cllm_bench.workloads.base import Setup
from cllm_bench.workloads.structured import FREE, Structured

SETUP = Setup("fake", str.encode, 1, 1, backend="fake", settings={"backend.fake.latency_ms": 0.1})


def test_a_run_measures_both_sides() -> None:
    work = replace(Structured().quick(), streams=2, answer_tokens=12, properties=20)
    ours, free = asyncio.run(work.one_repeat(SETUP, 0))
    assert (ours.side, free.side) == (OURS, FREE)
    assert ours.metrics.keys() == {figure.key for figure in work.figures}
    assert free.metrics.keys() == ours.metrics.keys() - {"compiling_ms"}
