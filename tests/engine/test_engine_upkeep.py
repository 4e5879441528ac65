"""When the engine lets the cache tidy up: within a share of a step, while idle, and when quiet work falls due."""

from __future__ import annotations

import threading
from typing import Any

from cllm.backends.fake import FakeBackend
from cllm.engine.budget import StepBudget
from cllm.engine.loop import IDLE_SLICE_S, Engine
from cllm.engine.scheduler import Scheduler
from cllm.kv.ops import BlockGeometry
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.paged.upkeep import UpkeepSettings
from engine_kit import Collector, make_request, reference

BLOCK_BYTES = 32


def elastic_engine(release_after_s: float, **options: Any) -> tuple[Engine, PagedKVManager, Collector]:
    backend, collector = FakeBackend(), Collector()
    geometry = BlockGeometry(64, 4)
    backend.allocate(geometry)
    upkeep = UpkeepSettings(release_after_s, idle_bytes=8 * BLOCK_BYTES, compaction="auto")
    kv = PagedKVManager(backend.ops, geometry, bytes_per_token=8, extent_blocks=4, upkeep=upkeep)  # type: ignore[arg-type]
    budget = StepBudget(inter_token_s=0.1, max_gap_s=0.25, prompt_only_s=0.5, max_tokens=32)
    return Engine(backend, Scheduler(kv, budget, max_running=4), collector, **options), kv, collector


def test_an_idle_engine_wakes_for_quiet_work_and_then_sleeps_for_good() -> None:
    engine, kv, _ = elastic_engine(release_after_s=0.05)
    asleep = threading.Event()
    wait = engine._wake.wait
    timeouts: list[float | None] = []

    def watched(timeout: float | None = None) -> bool:
        timeouts.append(timeout)
        if timeout is None:
            asleep.set()
        return wait(timeout)

    engine._wake.wait = watched  # type: ignore[method-assign]
    for letter in "abcdefgh":
        engine.scheduler.requests.add(make_request(letter * 24))
    engine.start()
    try:
        assert asleep.wait(60), "it never sleeps without a timeout"
        assert any(timeout is not None for timeout in timeouts), "it was not woken for the quiet work"
        usage = engine.snapshot.kv
        assert usage.released_bytes > 0 and usage.evictable == 8 and usage.extents_ready == 0
        assert kv.upkeep_at() is None
    finally:
        engine.stop(0.0)


def test_between_steps_upkeep_has_its_share_of_the_last_one() -> None:
    times = iter(range(1_000_000))
    engine, kv, _ = elastic_engine(1e9, upkeep_share=0.25, clock=lambda: float(next(times)))
    budgets: list[float] = []
    maintain = kv.maintain

    def watched(budget_s: float) -> bool:
        budgets.append(budget_s)
        return maintain(budget_s)

    kv.maintain = watched  # type: ignore[method-assign]
    engine.scheduler.requests.add(make_request("a prompt"))
    engine.turn()
    assert budgets == [0.25 * engine.snapshot.last_step_s] and budgets[0] > 0


def test_who_comes_while_the_cache_tidies_up_is_served_first() -> None:
    engine, kv, collector = elastic_engine(1e9)
    engine._accepting = True
    request = make_request("comes in the middle")
    slices: list[float] = []

    def endless(budget_s: float) -> bool:
        slices.append(budget_s)
        if len(slices) == 3:
            engine.submit(request)
        return True

    kv.maintain = endless  # type: ignore[method-assign]
    engine.turn()
    assert slices == [IDLE_SLICE_S] * 3
    while engine.scheduler.requests.has_work or engine._inbox:
        engine.turn()
        engine.scheduler.kv.maintain = lambda budget_s: False  # type: ignore[method-assign]
    assert collector.tokens[request.id, 0] == reference(request)


def test_a_stopping_engine_does_not_begin_to_tidy_up() -> None:
    engine, kv, _ = elastic_engine(1e9)
    kv.maintain = lambda budget_s: True  # type: ignore[method-assign]
    engine.begin_stop(1000.0)
    assert not engine._tidy()
