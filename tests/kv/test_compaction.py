"""Moving blocks together, giving memory back and taking it ahead: plans against a shadow, and the manager under random
use with upkeep at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.backends.fake import FakeBackend
from cllm.errors import BackendError
from cllm.kv.ops import Move
from cllm.kv.paged import upkeep
from cllm.kv.paged.compaction import (
    CompactionEstimate,
    CompactionTrigger,
    MovePlan,
    in_calls,
    plan_fill,
    plan_lift,
    plan_slide,
)
from cllm.kv.paged.extents import FULL, READY, ROOM_FOR_PROMPTS
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.paged.upkeep import STRIKES
from cllm.kv.sequence import KVSequence
from kv_kit import compute, held_tokens, run_to_end, state_of
from thorough import sampled
from upkeep_kit import PLANS, UpkeepMachine, elastic, settle

Maps = st.lists(st.booleans(), max_size=60).map(bytes)


def carried_out(free: bytes, moves: Sequence[Move]) -> list[int]:
    """What lies where afterwards, if block n holds n at first and a free one nothing (-1)."""
    cells = [-1 if free[block] else block for block in range(len(free))]
    for source, target, count in moves:
        taken = cells[source : source + count]
        cells[source : source + count] = [-1] * count
        cells[target : target + count] = taken
    return cells


def live(cells: Sequence[int]) -> list[int]:
    return [cell for cell in cells if cell >= 0]


@settings(deadline=None)
@given(Maps, st.integers(1, 60))
def test_a_plan_moves_live_blocks_and_loses_none(free: bytes, most: int) -> None:
    for plan in PLANS:
        moves = plan(free, most)
        assert sum(move.blocks for move in moves) <= most
        cells = carried_out(free, moves)
        assert sorted(live(cells)) == live(carried_out(free, []))


@settings(deadline=None)
@given(Maps)
def test_a_whole_fill_leaves_no_hole_and_moves_as_little_as_possible(free: bytes) -> None:
    moves = plan_fill(free, len(free))
    cells, count = carried_out(free, moves), free.count(0)
    assert -1 not in cells[:count]
    assert sum(move.blocks for move in moves) == free.count(0, count)
    assert all(free.find(0, move.target, move.target + move.blocks) < 0 for move in moves)


@settings(deadline=None)
@given(Maps, st.lists(st.booleans(), min_size=60, max_size=60))
def test_a_fill_uses_only_the_places_that_it_may(free: bytes, allowed: list[bool]) -> None:
    places = bytes(block and may for block, may in zip(free, allowed, strict=False))
    moves = plan_fill(free, len(free), places)
    targets = [target + i for _, target, count in moves for i in range(count)]
    assert all(places[target] for target in targets)
    cells = carried_out(free, moves)
    assert sorted(live(cells)) == live(carried_out(free, []))
    lowest = next((block for block in range(len(free)) if places[block] and cells[block] < 0), len(free))
    assert live(cells[lowest + 1 :]) == [], "a hole below a live block was left open"


@settings(deadline=None)
@given(Maps)
def test_a_whole_slide_keeps_the_order(free: bytes) -> None:
    cells = carried_out(free, plan_slide(free, len(free)))
    assert cells[: free.count(0)] == live(carried_out(free, []))


def test_a_lift_moves_blocks_up_within_twice_their_room() -> None:
    free = b"\0\0\0" + b"\1" * 9
    assert plan_lift(free, 12) == [Move(0, 3, 3)]


@settings(deadline=None)
@given(Maps, st.integers(1, 60), st.sampled_from(PLANS))
def test_a_call_that_fails_leaves_every_source_as_it_was(free: bytes, most: int, plan: MovePlan) -> None:
    """Within a call nothing is written where something live lies: neither a source of the call nor anything else."""
    moves = plan(free, most)
    now = bytearray(free)
    cells = carried_out(free, [])
    for call in in_calls(moves):
        for _, target, count in call:
            assert now.find(0, target, target + count) < 0
        cells_after = carried_out(bytes(now), call)
        cells = [cells[source] if source >= 0 else -1 for source in cells_after]
        now = bytearray(cell < 0 for cell in cells)
    assert cells == carried_out(free, moves)


def test_moves_that_would_overwrite_themselves_upwards_are_refused() -> None:
    with pytest.raises(ValueError, match="overwrite themselves"):
        list(in_calls([Move(0, 1, 3)]))


# -- the manager ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """An extent is prepared block by block, so that somebody may take it in the middle."""
    with patch.object(upkeep, "PREPARE_BYTES", 1):
        yield


class AlwaysMachine(UpkeepMachine):
    options: ClassVar[dict[str, Any]] = {"compaction": "always", "placement": "any"}


_profile = settings(max_examples=sampled(60), stateful_step_count=40, deadline=None)
for _machine in (UpkeepMachine, AlwaysMachine):
    _machine.TestCase.settings = _profile
TestUpkeep = UpkeepMachine.TestCase
TestAlways = AlwaysMachine.TestCase


def scattered(kv: PagedKVManager, backend: FakeBackend, count: int = 8) -> list[KVSequence]:
    """Sequences of two blocks each, every second of which has gone without a trace."""
    sequences = [run_to_end(backend, kv, [letter] * 8) for letter in range(2 * count)]
    for sequence in sequences[::2]:
        kv.release(sequence)
    kv.room.evict(2 * count)
    return sequences[1::2]


def test_after_quiet_time_prefixes_beyond_the_idle_size_go_and_memory_with_them() -> None:
    backend, kv, clock = elastic()
    for letter in range(10):
        kv.release(run_to_end(backend, kv, [letter] * 16))
    settle(kv)
    assert kv.usage().evictable == 40
    assert kv.upkeep_at() == clock.now + 10.0
    clock.now += 9.9
    settle(kv)
    assert kv.usage().evictable == 40
    clock.now += 0.1
    settle(kv)
    usage = kv.usage()
    assert usage.evictable == 4, "the idle size, less what is to be ready"
    assert (usage.extents_used, usage.extents_ready) == (1, 1)
    assert backend.ops.resident_bytes() == 8 * 16  # type: ignore[union-attr]
    assert kv.peek(run_to_end(backend, kv, [9] * 17).tokens.tobytes()) == 16, "the youngest stays"
    assert kv.upkeep_at() == clock.now + 10.0


def test_an_idle_cache_ends_up_without_anything_to_do() -> None:
    backend, kv, clock = elastic()
    kv.release(run_to_end(backend, kv, [1] * 16))
    settle(kv)
    clock.now += 10.0
    settle(kv)
    assert kv.upkeep_at() is None
    before = state_of(kv)
    clock.now += 1000.0
    assert not kv.maintain(1e-3)
    assert state_of(kv) == before


def test_scattered_prefixes_are_moved_together_so_that_memory_can_go_back() -> None:
    backend, kv, clock = elastic(idle_blocks=16, ahead_blocks=0)
    kept = scattered(kv, backend)
    for sequence in kept:
        kv.release(sequence)
    assert kv.usage().extents_used == 8
    clock.now += 10.0
    settle(kv)
    usage = kv.usage()
    assert (usage.extents_used, usage.extents_ready, usage.evictable) == (4, 0, 16)
    assert usage.compactions == 1 and usage.moved_bytes == 8 * 32
    for letter in range(1, 16, 2):
        sequence = KVSequence([letter] * 9)
        assert kv.admit(sequence) == 8
        assert held_tokens(backend, sequence) == [letter] * 8


def test_blocks_are_not_moved_into_memory_that_would_have_to_be_taken() -> None:
    backend, kv, clock = elastic(idle_blocks=16, ahead_blocks=0)
    first = run_to_end(backend, kv, [50] * 32)
    kept = scattered(kv, backend)
    kv.release(first, keep=False)
    kv.room.evict(1000)
    for extent in range(2):
        kv.upkeep.release(range(extent, extent + 1))
    for sequence in kept:
        kv.release(sequence)
    clock.now += 10.0
    settle(kv)
    usage = kv.usage()
    assert usage.compactions == 1 and usage.extents_used == 4 and usage.extents_ready == 0
    assert kv.arena.pool.free_map[:8] == b"\1" * 8


def test_blocks_are_moved_into_holes_and_not_into_extents_that_are_ready() -> None:
    backend, kv, clock = elastic(192, extent=32, idle_blocks=0, ahead_blocks=0)
    first = run_to_end(backend, kv, [90] * 256)
    kept, gone = [], []
    for letter in range(4):
        kept.append(run_to_end(backend, kv, [letter] * 64))
        gone.append(run_to_end(backend, kv, [50 + letter] * 64))
    for sequence in (first, *gone):
        kv.release(sequence, keep=False)
    kv.room.evict(1000)
    states = kv.arena.pool.extents.states
    assert bytes(states) == bytes([READY] * 2 + [ROOM_FOR_PROMPTS] * 4)
    assert kv.upkeep.estimate().gain_bytes == 2 * kv.arena.extent_bytes
    clock.now += 1.0
    while kv.maintain(1e-3):
        assert bytes(states[:2]) == bytes([READY] * 2)
    assert kv.upkeep.compactor.moved_blocks == 32
    assert bytes(states) == bytes([READY] * 2 + [FULL] * 2 + [READY] * 2)
    assert [held_tokens(backend, sequence) for sequence in kept] == [[letter] * 64 for letter in range(4)]


def test_without_compaction_scattered_prefixes_keep_their_memory() -> None:
    backend, kv, clock = elastic(idle_blocks=16, ahead_blocks=0, compaction="off")
    for sequence in scattered(kv, backend):
        kv.release(sequence)
    clock.now += 10.0
    settle(kv)
    assert kv.usage().extents_used == 8 and kv.usage().moved_bytes == 0


def test_one_stream_that_goes_on_does_not_hold_a_bursts_memory() -> None:
    backend, kv, clock = elastic(idle_blocks=0, ahead_blocks=0)
    running = run_to_end(backend, kv, [99] * 5)
    for sequence in scattered(kv, backend):
        kv.release(sequence)
    taken = kv.usage()
    assert taken.extents_used + taken.extents_ready == 9
    for _ in range(40):
        clock.now += 0.5
        running.tokens.append(7)
        assert kv.grow(running, 1)
        compute(backend, kv, running, 1)
        kv.maintain(1e-4)
        kv.check()
    usage = kv.usage()
    assert usage.evictable == 0 and usage.extents_used + usage.extents_ready <= 4
    assert held_tokens(backend, running) == running.tokens.tolist()


def test_while_people_come_only_what_was_long_unused_goes_back() -> None:
    backend, kv, clock = elastic(idle_blocks=8, ahead_blocks=0)
    burst = [run_to_end(backend, kv, [letter] * 16) for letter in range(8)]
    steady = run_to_end(backend, kv, [99] * 5)
    for sequence in burst:
        kv.release(sequence, keep=False)
    kv.room.evict(1000)
    for second in range(12):
        clock.now += 1.0
        kv.release(run_to_end(backend, kv, [100 + second] * 4), keep=False)
        kv.room.evict(1000)
        kv.maintain(1e-3)
        if second == 8:
            assert kv.usage().released_bytes == 0
    usage = kv.usage()
    assert usage.released_bytes > 0
    assert usage.extents_used + usage.extents_ready <= 2 + usage.extents_needed
    assert held_tokens(backend, steady) == [99] * 5


def test_memory_is_ready_before_the_first_one_comes_and_within_the_idle_size() -> None:
    backend, kv, _ = elastic(idle_blocks=12, ahead_blocks=8)
    settle(kv)
    usage = kv.usage()
    assert (usage.extents_ready, usage.prepared_bytes) == (2, 8 * 32)
    sequence = run_to_end(backend, kv, [1] * 8)
    assert sequence.blocks == [0, 1], "what is ready is used first"
    kv.release(sequence)
    settle(kv)
    assert kv.usage().extents_ready == 2
    for letter in range(2, 6):
        kv.release(run_to_end(backend, kv, [letter] * 8))
    settle(kv)
    usage = kv.usage()
    assert usage.extents_used + usage.extents_ready == 3


def test_only_free_memory_is_ever_given_back_or_prepared() -> None:
    backend, kv, clock = elastic(idle_blocks=4, ahead_blocks=4)
    free_map = kv.arena.pool.free_map
    asked: list[str] = []

    def watch(name: str) -> None:
        call: Callable[[int, int], None] = getattr(backend.ops, name)

        def watched(first: int, count: int) -> None:
            assert kv.arena.pool.free_map.find(0, first, first + count) < 0
            asked.append(name)
            call(first, count)

        setattr(backend.ops, name, watched)

    watch("release_pages")
    watch("prepare_pages")
    assert free_map is kv.arena.pool.free_map
    settle(kv)
    for sequence in scattered(kv, backend):
        kv.release(sequence)
    clock.now += 10.0
    settle(kv)
    assert set(asked) == {"release_pages", "prepare_pages"}


def test_the_os_is_asked_for_resident_memory_only_while_nothing_runs() -> None:
    backend, kv, clock = elastic(idle_blocks=16, ahead_blocks=0)
    sequence = run_to_end(backend, kv, [1] * 16)
    for _ in range(5):
        clock.now += 2.0
        settle(kv)
    assert kv.usage().resident_bytes == 0, "nothing was seen yet"
    kv.release(sequence)
    settle(kv)
    assert kv.usage().resident_bytes == backend.ops.resident_bytes() > 0  # type: ignore[union-attr]


def test_an_extent_that_is_used_meanwhile_is_not_prepared_any_further() -> None:
    backend, kv, clock = elastic(ahead_blocks=8)
    assert kv.upkeep._prepare(clock.now)
    assert kv.usage().prepared_bytes == 32
    sequence = run_to_end(backend, kv, [1] * 16)
    assert sequence.blocks == [0, 1, 2, 3]
    kv.upkeep._prepare(clock.now)
    assert held_tokens(backend, sequence) == [1] * 16


# -- always, and the price -----------------------------------------------------------------------------------------


def test_always_really_moves_what_lives_and_nothing_changes() -> None:
    backend, kv, clock = elastic(64, compaction="always")
    sequences = scattered(kv, backend)
    places = {tuple(tuple(s.blocks) for s in sequences)}
    for step in range(40):
        clock.now += 0.01
        assert kv.maintain(3e-7)
        places.add(tuple(tuple(s.blocks) for s in sequences))
        sequence = sequences[step % len(sequences)]
        sequence.tokens.append(step)
        assert kv.grow(sequence, 1)
        compute(backend, kv, sequence, 1)
        assert all(held_tokens(backend, s) == s.tokens.tolist() for s in sequences)
        kv.check()
    assert len(places) > 20 and kv.usage().compactions > 3


def test_a_small_budget_adds_up_to_a_block() -> None:
    backend, kv, _ = elastic(compaction="always")
    scattered(kv, backend)
    compactor = kv.upkeep.compactor
    third = kv.arena.block_bytes / compactor.throughput.bytes_per_s / 3
    assert [compactor.slice(plan_fill, 9, 1.01 * third) for _ in range(3)] == [None, None, 1]


def test_the_price_follows_what_came_back() -> None:
    trigger = CompactionTrigger()
    first = trigger.price
    assert trigger.pays(CompactionEstimate(1000, 1, 1000 / first))
    assert not trigger.pays(CompactionEstimate(1000, 1, 1001 / first))
    trigger.promise(1000, released_without=500, judge_at=5.0)
    trigger.judge(600, now=4.0)
    assert trigger.price == first
    trigger.judge(600, now=5.0)
    assert trigger.price > first
    dearer = trigger.price
    trigger.judge(600, now=6.0)
    assert trigger.price == dearer, "judged once"
    trigger.promise(1000, released_without=600, judge_at=9.0)
    trigger.judge(1500, now=7.0, at_once=True)
    assert trigger.price < dearer


@pytest.mark.parametrize("others_came", [False, True])
def test_what_was_empty_before_a_compaction_is_not_its_gain(others_came: bool) -> None:
    """Four extents are empty and a compaction frees four more. If others take those again, half of all that was free
    goes back, as it would have without any move."""
    backend, kv, clock = elastic(64, idle_blocks=0, ahead_blocks=0)
    kept = scattered(kv, backend)
    kv.release(run_to_end(backend, kv, [99] * 64), keep=False)
    kv.room.evict(1000)
    trigger = kv.upkeep.trigger
    first = trigger.price
    clock.now += 1.0
    settle(kv)
    usage = kv.usage()
    assert (usage.compactions, usage.extents_used, usage.extents_ready, usage.released_bytes) == (1, 4, 8, 0)
    others = [run_to_end(backend, kv, [70 + letter] * 16) for letter in range(4 * others_came)]
    for _ in range(25):
        clock.now += 1.0
        settle(kv)
    usage = kv.usage()
    assert usage.compactions == 1 and usage.extents_ready == 0
    assert usage.released_bytes == (4 if others_came else 8) * usage.extent_bytes
    assert (trigger.price > first) == others_came and trigger.price != first
    assert all(held_tokens(backend, s) == s.tokens.tolist() for s in (*kept, *others))


# -- faults --------------------------------------------------------------------------------------------------------


def failing(backend: FakeBackend, name: str, error: Exception, *, after: bool = False) -> list[int]:
    """Let every such call fail, before or after its effect; counts them."""
    calls: list[int] = []
    original = getattr(backend.ops, name)

    def fail(*args: Any) -> Any:
        calls.append(1)
        if after:
            original(*args)
        raise error

    setattr(backend.ops, name, fail)
    return calls


@pytest.mark.parametrize("after", [False, True])
def test_a_move_that_fails_changes_nothing_and_is_not_tried_for_ever(after: bool) -> None:
    backend, kv, clock = elastic(compaction="always")
    sequences = scattered(kv, backend)
    calls = failing(backend, "move_blocks", BackendError("no"), after=after)
    before = state_of(kv)[1:]
    for _ in range(10):
        clock.now += 1.0
        kv.maintain(1e-3)
        assert state_of(kv)[1:] == before
        kv.check()
    assert len(calls) == STRIKES == kv.usage().upkeep_failures
    assert all(held_tokens(backend, s) == s.tokens.tolist() for s in sequences)


@pytest.mark.parametrize("error", [BackendError("no", fatal=True), KeyError("no")])
def test_a_move_that_leaves_memory_in_doubt_is_raised(error: Exception) -> None:
    backend, kv, _ = elastic(compaction="always")
    scattered(kv, backend)
    failing(backend, "move_blocks", error)
    with pytest.raises(type(error)):
        kv.maintain(1e-3)
    kv.reset()
    kv.check()
    assert kv.usage().referenced == 0 and kv.usage().extents_used + kv.usage().extents_ready == 0


@pytest.mark.parametrize("name", ["release_pages", "prepare_pages", "resident_bytes"])
@pytest.mark.parametrize("error", [BackendError("no", fatal=True), MemoryError("no")])
def test_memory_that_cannot_be_given_back_or_prepared_is_nobodys_loss(name: str, error: Exception) -> None:
    backend, kv, clock = elastic()
    calls = failing(backend, name, error)
    for _ in range(6):
        settle(kv)
        for sequence in scattered(kv, backend):
            kv.release(sequence)
        settle(kv)
        clock.now += 10.0
        settle(kv)
        kv.check()
        kv.reset()
    assert len(calls) == STRIKES == kv.usage().upkeep_failures
    assert name in kv.details()["upkeep"]["not_tried_any_more"]
    assert held_tokens(backend, run_to_end(backend, kv, [1] * 9)) == [1] * 9
