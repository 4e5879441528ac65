"""Costs: files, fitting, and the real engine beside its simulation where the truth is known."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from cllm_bench.simulate.live import LiveRun, Turn, Workload
from cllm_bench.simulate.validate import WORKLOADS, RandomTokens, Validation, calibrations

from cllm.backends.base import Chunk, StepResult
from cllm.backends.fake import FakeBackend
from cllm.errors import CLLMError, ConfigError
from cllm.kv.ops import BlockGeometry, BlockOps, SlotGeometry, SlotOps
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.slots.manager import SlotKVManager
from cllm_bench.simulate.backend import SimulatedBackend, work_of
from cllm_bench.simulate.cost import CostModel, StepWork, built_in_costs, load_cost, parse_cost
from cllm_bench.simulate.fit import StepRecord, fit_cost, median_error
from cllm_bench.simulate.settings import Settings
from simulate_kit import COST
from step_of import rows_of

# -- files ---------------------------------------------------------------------------------------------------------


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "cost.json"
    COST.save(file)
    assert load_cost(str(file)) == COST


def test_those_that_come_with_cllm_are_sound() -> None:
    assert "smollm2" in built_in_costs()
    for name in built_in_costs():
        cost = load_cost(name)
        assert cost.name == name and len(cost.description) > 40


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"row_s": -1.0}, r"row_s is -1\.0: Input should be greater than or equal to 0"),
        ({"row_s": float("nan")}, "row_s is nan: Input should be a finite number"),
        ({"row_s": True}, "row_s is True: Input should be a valid number"),
        ({"row_s": "1"}, "row_s is '1': Input should be a valid number"),
        ({"kv_bytes_per_token": 1.5}, "kv_bytes_per_token is 1.5: Input should be a valid integer"),
        ({"name": 3}, "name is 3: Input should be a valid string"),
        ({"speed": 3}, "speed is 3: Unexpected"),
    ],
)
def test_wrong_values_are_named(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_cost(json.dumps({**asdict(COST), **change}), "x.json")


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.json: chunk_s: Field required"):
        parse_cost(json.dumps({k: v for k, v in asdict(COST).items() if k != "chunk_s"}), "x.json")
    for text in ("{", "[]"):
        with pytest.raises(ConfigError, match=r"cost model x\.json: "):
            parse_cost(text, "x.json")
    with pytest.raises(ConfigError, match=r"give a file, or one of: .*smollm2"):
        load_cost(str(tmp_path / "absent.json"))


# -- what a step is ------------------------------------------------------------------------------------------------


def chunk(start: int, count: int, wants: bool = True) -> Chunk:
    return Chunk(array("i", range(count)), start, wants)


def test_a_step_is_rows_and_prompts() -> None:
    chunks = [chunk(100, 1), chunk(7, 1), chunk(10, 4)]
    assert work_of(chunks) == StepWork(2, 107, 1, 4, 10 + 11 + 12 + 13)
    backend = SimulatedBackend(COST)
    assert len(rows_of(backend, chunks)) == 3
    expected = 0.004 + 2 * 0.002 + 107e-6 + 0.003 + 4 * 0.0007 + 46e-7
    assert backend.seconds == pytest.approx(expected)


# -- fitting -------------------------------------------------------------------------------------------------------


def records(cost: CostModel, count: int, noise: float = 0.0) -> list[StepRecord]:
    rng = np.random.default_rng(1)
    now = 0.0
    steps = []
    for _ in range(count):
        rows, chunks = int(rng.integers(0, 20)), int(rng.integers(0, 3))
        tokens = int(rng.integers(2, 300)) * chunks
        work = StepWork(rows, rows * int(rng.integers(10, 900)), chunks, tokens, tokens * int(rng.integers(1, 500)))
        seconds = cost.compute(work) * (1 + noise * rng.standard_normal())
        steps.append(StepRecord(now, now + seconds, work, rows + chunks))
        now += seconds + cost.overhead(rows + chunks)
    return steps


def fitted(steps: Sequence[StepRecord]) -> CostModel:
    return fit_cost("test", "round numbers", [steps], kv_bytes_per_token=1000)


def test_prices_are_found_again() -> None:
    cost = fitted(records(COST, 300))
    for name, price in asdict(COST).items():
        if isinstance(price, float):
            assert getattr(cost, name) == pytest.approx(price, rel=1e-3), name


def test_noise_and_disturbed_steps_do_little() -> None:
    steps = records(COST, 600, noise=0.05)
    disturbed = [step._replace(ended=step.ended + 5.0) if n % 50 == 0 else step for n, step in enumerate(steps)]
    cost = fitted(disturbed)
    assert median_error(cost, steps) < 0.06
    assert cost.prompt_token_s == pytest.approx(COST.prompt_token_s, rel=0.1)


def test_too_few_steps_are_no_measurement() -> None:
    with pytest.raises(CLLMError, match="at least 20 measured steps, there are 3"):
        fitted(records(COST, 3))


# -- the real engine beside its simulation -------------------------------------------------------------------------


class VirtualTime:
    """A clock that only a backend turns, so that nothing depends on the machine."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TimedFake(FakeBackend):
    """A fake backend whose steps take what a cost model says, in virtual time."""

    def __init__(self, cost: CostModel, clock: VirtualTime) -> None:
        super().__init__(vocab_size=1000)
        self._cost = cost
        self._clock = clock

    def collect(self, chunks: Sequence[Chunk]) -> StepResult:
        self._clock.now += self._cost.compute(work_of(chunks))
        return super().collect(chunks)


def make_validation(layout: str, cost: CostModel, tokens: int) -> Validation:
    clock = VirtualTime()
    backend = TimedFake(cost, clock)
    if layout == "paged":
        geometry = BlockGeometry(tokens // 16, 16)
        backend.allocate(geometry)
        assert isinstance(backend.ops, BlockOps)
        paged = PagedKVManager(backend.ops, geometry, bytes_per_token=8, eviction_threshold=0.8, watermark=0.02)
        return Validation(backend, paged, Settings(blocks=geometry.blocks, max_running=16), clock=clock)
    slots = SlotGeometry(4, 1024)
    backend.allocate(slots)
    assert isinstance(backend.ops, SlotOps)
    store = (tokens - slots.tokens) * cost.kv_bytes_per_token
    kv = SlotKVManager(
        backend.ops, slots, bytes_per_token=cost.kv_bytes_per_token, store_bytes=store, eviction_threshold=0.8
    )
    chosen = Settings(policy="slots", blocks=tokens, block_size=1, max_running=4, context=1024)
    return Validation(backend, kv, chosen, clock=clock)


@pytest.mark.parametrize(("layout", "tokens"), [("paged", 20_000), ("paged", 1_200), ("slots", 40_000)])
def test_the_real_engine_is_predicted(layout: str, tokens: int) -> None:
    """Cost fitted on one workload, three others predicted, with memory to spare and without."""
    # No time passes between the steps of virtual time, and nothing is moved.
    truth = replace(COST, overhead_s=0.0, overhead_row_s=0.0, kv_bytes_per_token=20)
    validation = make_validation(layout, truth, tokens)
    words = RandomTokens(1000, seed=1)
    measured = [validation.measure(workload) for workload in calibrations(words, 0.5)]
    cost = validation.fit("fake", "virtual", measured, truth.kv_bytes_per_token)
    assert cost.prompt_token_s == pytest.approx(truth.prompt_token_s, rel=0.05)
    for make in WORKLOADS:
        comparison = validation.compare(validation.measure(make(words, 0.4)), cost)
        assert comparison.holds
        assert abs(comparison.speed_error) < 0.05, comparison.measured.workload
        assert comparison.hit_rate == pytest.approx(comparison.measured.hit_rate, abs=0.05)


def test_a_conversation_goes_on_from_the_real_answer() -> None:
    validation = make_validation("paged", COST, 4_000)
    words = RandomTokens(1000, seed=1)
    turns = [Turn(words(40), 6), Turn(words(10), 5), Turn(words(30), 4, extends=False)]
    measured = validation.measure(Workload("three turns", [turns]))
    (first,) = measured.trace
    (second,) = first.followers
    (third,) = second.followers
    assert second.prompt == first.prompt + first.answer + turns[1].message  # type: ignore[operator]
    assert third.prompt == turns[2].message and not third.followers
    assert [request.answer_length for request in (first, second, third)] == [6, 5, 4]
    assert measured.answer_tokens == 15 and measured.trace.requests == 3


def test_a_failing_backend_ends_the_measurement() -> None:
    clock = VirtualTime()
    backend = TimedFake(COST, clock)
    backend.allocate(BlockGeometry(64, 16))
    assert isinstance(backend.ops, BlockOps)
    kv = PagedKVManager(backend.ops, BlockGeometry(64, 16), bytes_per_token=8)
    run = LiveRun(backend, kv, Settings(), clock)
    backend.faults.steps_to_fail = 1000
    with pytest.raises(CLLMError, match="one: a request failed: injected fault"):
        run.run(Workload("one", [[Turn(RandomTokens(1000, 1)(10), 5)]]))
