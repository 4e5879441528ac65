"""Whatever call fails: every request ends exactly once, nothing is held, and the next one is answered.

With `-s` it prints how many calls failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cllm.backends.base import Backend
from cllm.backends.llama_cpp import LlamaCppBackend
from cllm.backends.native import NativeBackend
from cllm.engine.request import Request
from cllm.kv.ops import BlockGeometry, SlotGeometry
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.paged.upkeep import UpkeepSettings
from cllm.kv.sizing import most_bytes
from cllm.kv.slots.manager import SlotKVManager
from cllm.models.gguf import GGUFModel
from engine_kit import make_request
from fault_kit import BACKEND_CALLS, WAYS, Clock, Machine, Rig, Scenario, fail_every_call
from fault_scenarios import (
    CASES,
    SCENARIOS,
    cancels,
    elastic,
    forks,
    make_fake,
    moved_all_the_time,
    preempted_answer,
    rebuilds,
    shared_prefixes,
    takes_time,
    windows,
)
from native_kit import write_model
from pipelined_backend import PipelinedFake
from thorough import exhaustive
from window_kit import windowed_reference

AHEAD_WAYS = ("error", "fatal", "aborted", "bug")

pytestmark = [exhaustive, pytest.mark.usefixtures("quiet")]


# -- scenarios -----------------------------------------------------------------------------------------------------


def shut_down_while_moving(rig: Rig) -> None:
    rig.before_step = takes_time(rig)
    rig.submit("ends", 3)
    rig.submit("does not", 60)
    rig.turns(3)
    rig.stop(0.05)
    rig.run()


def given_back(rig: Rig) -> None:
    """What is left of a burst is moved together and its memory given back, while one goes on and when all is quiet."""
    rig.run()
    rig.before_step = takes_time(rig)
    stays = rig.submit("goes on", 40)
    for letter in "abcdef":
        rig.submit(letter * 9, 1)
    rig.turns(10)
    for letter in "be":
        rig.submit(letter * 9, 1)
    rig.turns(4)
    rig.now += 11.0
    rig.turns(4)
    rig.cancel(stays)
    rig.run()
    rig.now += 11.0
    rig.run()
    rig.submit("e" * 9, 2)
    rig.run()


@pytest.mark.parametrize(("layout", "scenario"), CASES)
def test_on_the_fake_backend(layout: str, scenario: Scenario) -> None:
    runs = fail_every_call(lambda: make_fake(layout, scenario), scenario)
    print(f"{layout} {scenario.__name__}: {runs}")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_a_backend_that_computes_ahead(scenario: Scenario) -> None:
    reached = Rig(make_fake("ahead", scenario))
    scenario(reached)
    assert {"backend.submit", "backend.collect"} <= set(reached.calls.names)
    runs = fail_every_call(lambda: make_fake("ahead", scenario), scenario, AHEAD_WAYS)
    print(f"ahead {scenario.__name__}: {runs}")


@pytest.mark.parametrize("layout", ["paged", "slots", "ahead"])
def test_windows(layout: str) -> None:
    memory = "slots" if layout == "slots" else "paged"

    def make() -> Machine:
        return replace(
            make_fake(layout, windows), expected=lambda *answer: windowed_reference(answer[0], memory, answer[1])
        )

    runs = fail_every_call(make, windows, AHEAD_WAYS if layout == "ahead" else tuple(WAYS))
    print(f"{layout} windows: {runs}")


@pytest.mark.parametrize(
    ("compaction", "scenario"),
    [("always", moved_all_the_time), ("always", shut_down_while_moving), ("auto", given_back)],
)
def test_while_blocks_move(compaction: str, scenario: Scenario) -> None:
    reached = Rig(elastic(compaction))
    scenario(reached)
    wanted = {"ops.move_blocks"} | ({"ops.release_pages", "ops.prepare_pages"} if compaction == "auto" else set())
    assert wanted <= set(reached.calls.names)
    runs = fail_every_call(lambda: elastic(compaction), scenario)
    print(f"{scenario.__name__}: {runs}")


@pytest.mark.parametrize(
    ("compaction", "scenario"), [("always", moved_all_the_time), ("always", shut_down_while_moving)]
)
def test_while_blocks_move_under_steps_that_are_under_way(compaction: str, scenario: Scenario) -> None:
    def make() -> Machine:
        return elastic(compaction, PipelinedFake(context_length=96))

    reached = Rig(make())
    scenario(reached)
    assert "ops.move_blocks" in reached.calls.names
    runs = fail_every_call(make, scenario, AHEAD_WAYS)
    print(f"ahead {scenario.__name__}: {runs}")


# -- real backends -------------------------------------------------------------------------------------------------

Make = Callable[[], Machine]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", n_layers=1, n_embd=32, n_ff=32)


def alone(make: Make) -> Callable[[Request, int], list[int]]:
    """Answers of a machine that does nothing else, each computed once."""
    known: dict[str, list[list[int]]] = {}

    def answers(request: Request, index: int) -> list[int]:
        key = repr((request.prompt, request.params))
        if key not in known:
            rig = Rig(make())
            again = make_request(request.prompt, request.params, max_context=96)
            rig.engine.submit(again)
            rig.run()
            known[key] = [rig.collector.tokens[again.id, n] for n in range(request.params.n)]
        return known[key][index]

    return answers


def fresh(backend: Backend) -> None:
    """Without what a run before has put around it, and empty."""
    for name in BACKEND_CALLS:
        backend.__dict__.pop(name, None)
    backend.rebuild()


def native_machine(
    backend: NativeBackend,
    blocks: int,
    expected: Callable[[Request, int], list[int]],
    upkeep: UpkeepSettings | None = None,
) -> Machine:
    fresh(backend)
    geometry, clock = BlockGeometry(blocks, 16), Clock()
    backend.allocate(geometry)
    kv = PagedKVManager(
        backend.ops, geometry, bytes_per_token=8, eviction_threshold=0.7, extent_blocks=2, upkeep=upkeep, clock=clock
    )
    return Machine(backend, kv, expected, clock=clock)


@pytest.fixture(scope="module")
def native(tiny: Path) -> Iterator[Callable[..., Make]]:
    """From a number of blocks, and perhaps settings of the upkeep, to what makes machines."""
    settings = {"threads": 1, "instruction_set": "auto", "kv_type_k": "f16", "kv_type_v": "f16"}
    with NativeBackend(GGUFModel.open(tiny), **settings) as one, NativeBackend(GGUFModel.open(tiny), **settings) as two:
        for backend in (one, two):
            backend.allocate(BlockGeometry(1, 16))
        answers = alone(lambda: native_machine(two, 16, lambda request, index: []))
        yield lambda blocks, upkeep=None: lambda: native_machine(one, blocks, answers, upkeep)


@pytest.mark.parametrize("scenario", [shared_prefixes, forks, cancels, preempted_answer, rebuilds])
def test_on_the_native_backend(native: Callable[[int], Make], scenario: Scenario) -> None:
    blocks = {preempted_answer: 2, shared_prefixes: 5}.get(scenario, 12)
    runs = fail_every_call(native(blocks), scenario)
    print(f"native {scenario.__name__}: {runs}")


def test_while_blocks_move_on_the_native_backend(native: Callable[..., Make]) -> None:
    runs = fail_every_call(native(12, UpkeepSettings(compaction="always")), moved_all_the_time)
    print(f"native moved_all_the_time: {runs}")


def llama_machine(backend: LlamaCppBackend, count: int, expected: Callable[[Request, int], list[int]]) -> Machine:
    fresh(backend)
    store = 2 * most_bytes(48, 128)
    kv = SlotKVManager(backend.ops, SlotGeometry(count, 256), bytes_per_token=128, store_bytes=store)
    return Machine(backend, kv, expected, max_running=count)


LLAMA_SETTINGS: dict[str, Any] = {
    "threads": 1, "n_batch": 64, "n_ubatch": 64, "kv_type_k": "f16", "kv_type_v": "f16",
    "flash_attention": True, "mmap": True, "mlock": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tiny: Path) -> Iterator[Make]:
    with LlamaCppBackend(tiny, **LLAMA_SETTINGS) as one, LlamaCppBackend(tiny, **LLAMA_SETTINGS) as two:
        for backend in (one, two):
            backend.allocate(SlotGeometry(2, 256))
        answers = alone(lambda: llama_machine(two, 2, lambda request, index: []))
        yield lambda: llama_machine(one, 2, answers)


def second_wave(rig: Rig) -> None:
    """The context is rebuilt for more while one runs, and for fewer afterwards."""
    rig.submit("first of all", 6)
    rig.turns(2)
    rig.submit("the second", 2)
    rig.run()
    rig.idle_check()
    rig.submit("first of", 2)
    rig.run()
    if not rig.fault.number:
        assert rig.machine.kv.resizer.resizes == 2  # type: ignore[attr-defined]


@pytest.mark.model
def test_on_llama_cpp_with_slots_on_demand(tiny: Path, llama: Make) -> None:
    answers = llama().expected
    geometry = SlotGeometry(2, 256, at_start=1)
    with LlamaCppBackend(tiny, **LLAMA_SETTINGS) as backend:
        assert backend.resizes_slots
        backend.allocate(geometry)

        def make() -> Machine:
            fresh(backend)
            settings = {"store_bytes": 2 * most_bytes(256, 128), "release_after_s": 1.0, "idle_bytes": 256 * 128 + 9999}
            clock = Clock()
            kv = SlotKVManager(backend.ops, geometry, bytes_per_token=128, clock=clock, **settings)
            return Machine(backend, kv, answers, max_running=2, clock=clock)

        runs = fail_every_call(make, second_wave, ways=("error", "bug"))
    print(f"llama_cpp second_wave: {runs}")


@pytest.mark.model
@pytest.mark.parametrize("scenario", [shared_prefixes, forks, cancels, rebuilds])
def test_on_llama_cpp(llama: Make, scenario: Scenario) -> None:
    runs = fail_every_call(llama, scenario, ways=("error", "bug"))
    print(f"llama_cpp {scenario.__name__}: {runs}")
