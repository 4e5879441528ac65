"""The memory-* workloads: what they make of what they measure, and that each runs to its end."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_kit import bench, make_answer, measured, setup_for
from cllm_bench.figures import OURS
from cllm_bench.workloads.base import Setup
from cllm_bench.workloads.memory_burst import KEPT, MemoryBurst, back_after, first_token_ratio
from cllm_bench.workloads.memory_busy import NEVER_MOVED, MemoryBusy, _gap_ratios
from cllm_bench.workloads.memory_moves import MEMCPY, MemoryMoves
from cllm_bench.workloads.memory_placement import MemoryPlacement, fill_holes
from cllm_bench.workloads.memory_waste import COMPACTED, RESERVED, MemoryWaste, _Load
from thorough import slow


def fake_setup() -> Setup:
    settings = {"backend.fake.latency_ms": 8}
    return replace(setup_for(""), encode=str.encode, backend="fake", model="smollm2", settings=settings)


# -- waste ---------------------------------------------------------------------------------------------------------


async def test_blocks_waste_little_and_reserved_memory_much() -> None:
    small = MemoryWaste(requests=60, running=16, memory_tokens=8192)
    ours, reserved, compacted = await measured(small, setup_for(""))
    assert [ours.side, reserved.side, compacted.side] == [OURS, RESERVED, COMPACTED]
    assert 0 < ours.metrics["waste_percent"] <= ours.metrics["worst_percent"] < reserved.metrics["waste_percent"]
    assert ours.metrics["running"] > reserved.metrics["running"]
    assert ours.metrics["moved_mb"] == reserved.metrics["moved_mb"] == 0 < compacted.metrics["moved_mb"]


async def test_larger_blocks_waste_more() -> None:
    found = [
        (await measured(MemoryWaste(requests=60, running=16, block_size=size), setup_for("")))[0] for size in (16, 64)
    ]
    assert found[0].metrics["waste_percent"] < found[1].metrics["waste_percent"]


def test_who_finds_no_room_is_thrown_out_and_computed_again() -> None:
    workload = MemoryWaste(requests=30, running=16, memory_tokens=2048, answer_most=1024)
    load = _Load(workload._paged(), deque(workload._requests(0)), workload.running)
    asked = [request.left for request in load.waiting]
    metrics = load.run()
    assert metrics["preempted"] > 0 and len(asked) == 30 and not load.waiting
    load.manager.check()
    held = {id(request.sequence) for request in load.running}
    assert load.manager.usage().sequences_running == len(held)


# -- moves and places ----------------------------------------------------------------------------------------------


@given(live=st.sets(st.integers(0, 60), min_size=1))
def test_holes_are_filled_from_the_end(live: set[int]) -> None:
    blocks = np.array(sorted(live), np.int32)
    plan = fill_holes(blocks)
    now = set(live)
    for source, target, count in plan.tolist():
        assert count == 1 and source in now and target not in now and target < source
        now = now - {source} | {target}
    assert now == set(range(len(live)))
    assert all(one > other for one, other in pairwise(plan[:, 0].tolist()))


@pytest.mark.model
async def test_moves_are_measured_beside_memcpy() -> None:
    setup = replace(setup_for(""), model="smollm2")
    ours, memcpy = await measured(MemoryMoves().quick(), setup)
    assert (ours.side, memcpy.side) == (OURS, MEMCPY)
    assert all(value > 0 for run in (ours, memcpy) for value in run.metrics.values())
    assert ours.metrics.keys() == memcpy.metrics.keys() == {figure.key for figure in MemoryMoves.figures}


@pytest.mark.model
async def test_places_are_measured_and_compaction_gives_memory_back() -> None:
    runs = await measured(MemoryPlacement().quick(), replace(setup_for(""), model="smollm2"))
    found = {run.side: run.metrics for run in runs}
    assert set(found) == {OURS, "in runs, small pages"} | {
        f"{how}, {pages} pages" for how in ("scattered", "compacted") for pages in ("large", "small")
    }
    for pages in ("large", "small"):
        scattered, compacted = found[f"scattered, {pages} pages"], found[f"compacted, {pages} pages"]
        assert scattered["resident_mb"] >= compacted["resident_mb"]
    assert found["compacted, small pages"]["taken_percent"] == pytest.approx(100, abs=1)
    assert all(metrics["tokens_per_s"] > 0 for metrics in found.values())


# -- a busy server -------------------------------------------------------------------------------------------------


def test_gaps_are_compared_round_by_round() -> None:
    slow, fast = [make_answer(0, 1, 3, 5)], [make_answer(0, 1, 2, 3)]
    assert _gap_ratios([slow, fast], [fast, fast], 99) == [2.0, 1.0]


@slow
async def test_two_servers_take_turns_with_the_same_people() -> None:
    workload = replace(MemoryBusy().quick(), people=5)
    moving, resting = await measured(workload, fake_setup())
    assert (moving.side, resting.side) == (OURS, NEVER_MOVED)
    assert len(moving.answers) == len(resting.answers) == workload.rounds * workload.people
    assert [one.prompt_tokens for one in moving.answers if one.complete] == [
        one.prompt_tokens for one in resting.answers if one.complete
    ]
    assert "kv.compaction always" in moving.facts["settings"]
    assert {figure.key for figure in MemoryBusy.figures} <= moving.metrics.keys()


# -- a burst -------------------------------------------------------------------------------------------------------


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
        (curve,) = run.curves
        assert len(curve.points) >= 2 and curve.points[0][0] < curve.points[-1][0]
    assert giving.metrics["first_token_ratio"] > 0 and "first_token_ratio" not in keeping.metrics
    assert "kv.release_after_s 0.5" in giving.facts["settings"]


def test_the_command_writes_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "waste.json"
    assert bench("memory-waste", "--quick", "--repeats", "1", "--json", str(file)) == 0
    (waste,) = json.loads(file.read_text())["workloads"]
    assert [run["side"] for run in waste["runs"]] == [OURS, RESERVED, COMPACTED]
