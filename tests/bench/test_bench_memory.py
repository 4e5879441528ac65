"""The workload memory-burst: what it makes of what it measures, and that it runs to its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench_kit import make_answer, measured, setup_for
from cllm_bench.figures import OURS
from cllm_bench.workloads.base import Setup
from cllm_bench.workloads.memory_burst import KEPT, MemoryBurst, back_after, first_token_ratio
from thorough import slow


def fake_setup() -> Setup:
    settings = {"backend.fake.latency_ms": 8}
    return replace(setup_for(""), encode=str.encode, backend="fake", model="smollm2", settings=settings)


@pytest.mark.parametrize(
    ("samples", "back"),
    [([(0, 9), (1, 5)], 1), ([(0, 5), (1, 9), (2, 5), (3, 4)], 2), ([(0, 5), (1, 9)], None), ([], None)],
)
def test_memory_is_back_when_it_stays_back(samples: list[tuple[float, float]], back: float | None) -> None:
    assert back_after(samples, 5) == back


def test_first_tokens_are_compared_burst_by_burst() -> None:
    one, other = [make_answer(0, 3)], [make_answer(0, 2)]
    found = first_token_ratio([one, one], [other, other])
    assert found["first_token_ratio"] == pytest.approx(1.5)


@slow
async def test_a_burst_is_watched_and_more_follow() -> None:
    workload = replace(MemoryBurst().quick(), filled_mb=0.1, prompt_tokens=100, quiet_s=0.3)
    giving, keeping = await measured(workload, fake_setup())
    assert (giving.side, keeping.side) == (OURS, KEPT)
    for run in (giving, keeping):
        assert 0 < run.metrics["before_mb"] <= run.metrics["peak_mb"] and run.metrics["ttft_p50_ms"] > 0
        assert len(run.samples) >= 2 and run.metrics["kv_peak_mb"] > 0
        assert max(each.kv_cached_mb or 0 for each in run.samples) > 0
    assert giving.metrics["first_token_ratio"] > 0 and "first_token_ratio" not in keeping.metrics
    assert "kv.release_after_s 0.5" in giving.facts["settings"]
