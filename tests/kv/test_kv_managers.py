"""Both KV managers under random use: invariants after every step, and memory that always spells the right tokens."""

from __future__ import annotations

import importlib
import pkgutil
from array import array
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

import cllm.kv
from cllm.backends.base import Chunk
from cllm.backends.fake import FakeBackend
from cllm.errors import BackendError
from cllm.kv.manager import CHECK_SLICE, KVManager, PositionMismatchError
from cllm.kv.ops import SlotOps
from cllm.kv.sequence import STATE_BLOCKS, KVSequence
from cllm.kv.slots.manager import SlotKVManager
from cllm.kv.view import FREE
from kv_kit import (
    IDLE_BYTES,
    SLOT_BYTES,
    ManagerMachine,
    compute,
    held_tokens,
    on_demand,
    paged,
    run_to_end,
    slots,
    state_of,
)
from step_of import rows_of
from thorough import sampled


class SlotMachine(ManagerMachine):
    def build(self) -> tuple[FakeBackend, KVManager]:
        return slots(eviction_threshold=0.8, max_sequences=6)


class OnDemandMachine(SlotMachine):
    """One slot at the start, up to four, and back to one after a quiet time. The budget is never passed."""

    def build(self) -> tuple[FakeBackend, KVManager]:
        self.now = 0.0
        return on_demand(clock=lambda: self.now)

    def check_found(self, cached: int, expected: int) -> None:
        assert cached <= expected  # more slots may have taken the room of what was saved

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def quiet_for_long(self) -> None:
        self.now += 20.0
        self.kv.maintain(0.0)
        assert (due := self.kv.upkeep_at()) is None or due > self.now
        slots = len(self.kv.places.slots)
        if not self.live:
            taken = slots * SLOT_BYTES + self.kv.places.store.bytes
            assert slots == 1 or taken <= IDLE_BYTES
        else:
            assert slots <= max(2, 4 * len(self.live))

    @invariant()
    def slots_are_those_of_the_backend(self) -> None:
        assert len(self.kv.places.slots) == len(self.backend.memory._cells) <= 4


class TinyStoreMachine(ManagerMachine):
    """Almost no store: finished sequences live in slots or not at all."""

    def build(self) -> tuple[FakeBackend, KVManager]:
        return slots(count=3, store_tokens=12, eviction_policy="slru")


class SegmentedMachine(ManagerMachine):
    def build(self) -> tuple[FakeBackend, KVManager]:
        return paged(blocks=10, block_size=2, eviction_policy="slru", watermark=0.2)


class WorthMachine(ManagerMachine):
    def build(self) -> tuple[FakeBackend, KVManager]:
        return paged(blocks=12, block_size=2, eviction_policy="worth", eviction_threshold=0.9)


class LocalMachine(ManagerMachine):
    """Beside the full layer there are two with a window of five tokens."""

    policy = "lru"

    def build(self) -> tuple[FakeBackend, KVManager]:
        return paged(blocks=40, window=5, eviction_threshold=0.8, max_sequences=6, eviction_policy=self.policy)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        length = data.draw(st.integers(0, sequence.num_computed))
        assert self.kv.truncate(sequence, length) <= length

    @invariant()
    def no_more_is_held_than_the_window_and_what_is_ahead(self) -> None:
        for sequence in self.live:
            assert sequence.local is not None
            ahead = max(16, len(sequence.tokens) - sequence.num_computed)  # more for a step that was aborted
            assert len(sequence.local.blocks) <= 2 + -(-ahead // self.kv.unit_tokens) + 1 + 2


class RebuiltMachine(LocalMachine):
    """Windows are computed again by themselves where that is nearer than a snapshot."""

    def build(self) -> tuple[FakeBackend, KVManager]:
        backend, kv = paged(blocks=80, window=5, reach=4, eviction_threshold=0.8, max_sequences=6)
        kv.release(run_to_end(backend, kv, [0] * 60))
        return backend, kv

    @rule(common=st.integers(1, 59), own=st.lists(st.integers(0, 1), max_size=30))
    def admit_another_end(self, common: int, own: list[int]) -> None:
        self.take([0] * common + [1] + own)


class LocalWorthMachine(LocalMachine):
    policy = "worth"


class WorthStoreMachine(ManagerMachine):
    def build(self) -> tuple[FakeBackend, KVManager]:
        return slots(eviction_threshold=0.8, eviction_policy="worth")


class StateMachine(LocalMachine):
    """A layer carries a state of three cells."""

    def build(self) -> tuple[FakeBackend, KVManager]:
        return paged(blocks=60, states=3, eviction_threshold=0.8, max_sequences=6)

    @invariant()
    def no_more_is_held_than_the_window_and_what_is_ahead(self) -> None:
        for sequence in self.live:
            assert sequence.state is not None and sequence.local is None
            assert len({block.number for block in sequence.state.blocks}) <= 3

    @invariant()
    def the_state_at_the_end_of_the_last_block_is_known(self) -> None:
        """So that a sequence that is preempted loses no more than a block, or in the middle of a prompt a few."""
        size = self.kv.unit_tokens
        for sequence in self.live:
            assert sequence.state is not None
            known = sequence.state.known_at_end(size)
            in_answer = bool(sequence.marks) and sequence.marks[-1] > len(sequence.tokens)
            assert known <= sequence.num_computed < known + (1 if in_answer else STATE_BLOCKS) * size
            assert not known or self.kv.tables.local.states.known_at(sequence, known) is not None  # type: ignore[union-attr]


class LocalStateMachine(StateMachine):
    """Layers with a window, and one that carries a state."""

    def build(self) -> tuple[FakeBackend, KVManager]:
        return paged(blocks=80, window=5, states=2, eviction_threshold=0.8, max_sequences=6)

    @invariant()
    def no_more_is_held_than_the_window_and_what_is_ahead(self) -> None:
        for sequence in self.live:
            assert sequence.state is not None and sequence.local is not None
            assert len({block.number for block in sequence.state.blocks}) <= 3


_profile = settings(max_examples=sampled(50), stateful_step_count=40, deadline=None)
_MACHINES: tuple[type[ManagerMachine], ...] = (ManagerMachine, SlotMachine, OnDemandMachine, TinyStoreMachine)
_MACHINES += (
    SegmentedMachine,
    WorthMachine,
    LocalMachine,
    LocalWorthMachine,
    RebuiltMachine,
    WorthStoreMachine,
    StateMachine,
    LocalStateMachine,
)
for _machine in _MACHINES:
    _machine.TestCase.settings = _profile
TestPaged = ManagerMachine.TestCase
TestSlots = SlotMachine.TestCase
TestOnDemand = OnDemandMachine.TestCase
TestTinyStore = TinyStoreMachine.TestCase
TestSegmented = SegmentedMachine.TestCase
TestWorth = WorthMachine.TestCase
TestLocal = LocalMachine.TestCase
TestRebuilt = RebuiltMachine.TestCase
TestLocalWorth = LocalWorthMachine.TestCase
TestWorthStore = WorthStoreMachine.TestCase
TestStates = StateMachine.TestCase
TestLocalStates = LocalStateMachine.TestCase


def test_paged_shares_blocks_and_computes_a_prompt_once() -> None:
    backend, kv = paged()
    first = run_to_end(backend, kv, list(range(12)))
    second = KVSequence(list(range(12)))
    assert kv.admit(second) == 8  # the last block holds the last token, which is always computed
    assert second.blocks[:2] == first.blocks[:2]
    assert kv.usage().referenced == 4


def test_paged_copies_a_shared_partial_block_on_write() -> None:
    backend, kv = paged()
    parent = run_to_end(backend, kv, [1, 2, 3, 4, 5, 6])
    child = KVSequence(parent.tokens)
    assert kv.fork(parent, child)
    assert child.blocks == parent.blocks
    for sequence, token in ((parent, 7), (child, 8)):
        sequence.tokens.append(token)
        assert kv.grow(sequence, 1)
        compute(backend, kv, sequence, 1)
    assert child.blocks[0] == parent.blocks[0] and child.blocks[1] != parent.blocks[1]
    assert held_tokens(backend, parent)[-1] == 7 and held_tokens(backend, child)[-1] == 8


def test_paged_twins_end_up_on_the_same_blocks() -> None:
    backend, kv = paged()
    pair = [KVSequence(list(range(10))) for _ in range(2)]
    for sequence in pair:
        assert kv.admit(sequence) == 0
    assert kv.usage().referenced == 6
    for sequence in pair:
        compute(backend, kv, sequence, 10)
    kv.check()
    assert pair[0].blocks[:2] == pair[1].blocks[:2]
    assert kv.usage().referenced == 4


def test_eviction_takes_the_oldest_and_never_what_runs() -> None:
    backend, kv = paged(blocks=8)
    old = run_to_end(backend, kv, [1] * 8)
    kv.release(old)
    recent = run_to_end(backend, kv, [2] * 8)
    kv.release(recent)
    running = run_to_end(backend, kv, [3] * 8)
    newcomer = KVSequence([4] * 16)
    assert kv.admit(newcomer) == 0
    assert kv.peek(array("i", [1] * 9).tobytes()) == 0
    assert kv.peek(array("i", [2] * 9).tobytes()) == 8
    assert held_tokens(backend, running) == [3] * 8


def test_admission_without_room_changes_nothing() -> None:
    """Not even where a part of an edge could be shared, whose owner has gone."""
    backend, kv = paged(blocks=8)
    kv.release(run_to_end(backend, kv, [2] * 12))
    kv.release(run_to_end(backend, kv, [3] * 4))
    run_to_end(backend, kv, [1] * 12)
    before = state_of(kv)
    late = KVSequence([2] * 8 + [4] * 20)
    for _ in range(3):
        assert kv.admit(late) is None
    assert state_of(kv) == before
    assert not late.admitted


def test_what_is_found_counts_as_room_only_once() -> None:
    """The blocks of a prefix that nobody uses are evictable, but not for the sequence that is to share them."""
    backend, kv = paged(blocks=4)
    kv.release(run_to_end(backend, kv, [1] * 8))
    assert kv.admit(KVSequence([1] * 8 + [2] * 9)) is None
    assert kv.admit(KVSequence([1] * 8 + [2] * 8)) == 8


def test_only_a_query_counts_for_the_hit_rate() -> None:
    class Again(KVSequence):
        counts_as_query = False

    for backend, kv in (paged(), slots()):
        kv.release(run_to_end(backend, kv, [1] * 9))
        before = kv.usage()
        assert kv.admit(Again([1] * 9)) == 8
        after = kv.usage()
        assert (after.query_tokens, after.hit_tokens) == (before.query_tokens, before.hit_tokens) == (9, 0)


def test_watermark_leaves_room_to_grow_but_never_blocks_a_lone_sequence() -> None:
    _, kv = paged(blocks=10, watermark=0.5)
    assert kv.admit(KVSequence([1] * 36)) is not None
    assert kv.admit(KVSequence([2] * 4)) is None


def test_threshold_evicts_in_the_background() -> None:
    backend, kv = paged(blocks=10, eviction_threshold=0.5)
    for letter in range(4):
        kv.release(run_to_end(backend, kv, [letter] * 8))
    kv.maintain(0.0)
    usage = kv.usage()
    assert usage.evictable == 5 and usage.evictions == 3


def test_eviction_listener_hears_of_it() -> None:
    heard: list[tuple[int, float]] = []
    backend, kv = paged(blocks=4)
    kv.on_eviction = lambda count, seconds: heard.append((count, seconds))
    kv.release(run_to_end(backend, kv, [1] * 16))
    assert kv.admit(KVSequence([2] * 8)) == 0
    assert [count for count, _ in heard] == [2]


def test_slots_reuse_a_prefix_of_a_running_sequence() -> None:
    backend, kv = slots()
    first = run_to_end(backend, kv, [1, 2, 3, 4, 5])
    second = KVSequence([1, 2, 3, 9])
    assert kv.admit(second) == 3
    assert second.slot != first.slot
    assert held_tokens(backend, second) == [1, 2, 3]


def test_slots_go_on_in_place_when_a_chat_continues() -> None:
    backend, kv = slots()
    first = run_to_end(backend, kv, [1, 2, 3, 4, 5])
    slot = first.slot
    kv.release(first)
    follow_up = KVSequence([1, 2, 3, 4, 5, 6, 7])
    assert kv.admit(follow_up) == 5
    assert follow_up.slot == slot
    assert kv.usage().moved_bytes == 0


def test_slots_keep_more_sequences_than_there_are_slots() -> None:
    backend, kv = slots(count=2, store_tokens=400)
    for letter in range(6):
        kv.release(run_to_end(backend, kv, [letter] * 30))
    for letter in range(6):
        assert kv.peek(array("i", [letter] * 31).tobytes()) == 30
    again = KVSequence([0] * 31)
    assert kv.admit(again) == 30
    assert held_tokens(backend, again) == [0] * 30


def test_slots_save_a_tail_before_it_is_cut_off() -> None:
    backend, kv = slots(count=1, store_tokens=100)
    kv.release(run_to_end(backend, kv, [1] * 10 + [2] * 20))
    branch = run_to_end(backend, kv, [1] * 10 + [3] * 5)
    kv.release(branch)
    assert kv.peek(array("i", [1] * 10 + [2] * 21).tobytes()) == 30


def test_slots_drop_what_a_longer_sequence_covers() -> None:
    backend, kv = slots(count=2)
    kv.release(run_to_end(backend, kv, [1, 2, 3]))
    other = run_to_end(backend, kv, [1, 2, 3, 4, 5])
    kv.release(other)
    kv.release(run_to_end(backend, kv, [1, 2, 3, 4, 5]))
    assert kv.usage().sequences_held == 1


def test_running_slots_are_kept_adjacent() -> None:
    backend, kv = slots(count=4)
    sequences = [run_to_end(backend, kv, [letter] * 5) for letter in range(4)]
    kv.release(sequences[1])
    kv.arrange()
    running = [sequence for n, sequence in enumerate(sequences) if n != 1]
    assert sorted(sequence.slot for sequence in running) == [0, 1, 2]
    for sequence in running:
        assert held_tokens(backend, sequence) == sequence.tokens.tolist()
    assert kv.usage().compactions == 1
    assert kv.peek(array("i", [1] * 6).tobytes()) == 5  # what was in the way is still cached


def test_slots_run_out_without_harm() -> None:
    backend, kv = slots(count=2)
    for letter in range(2):
        run_to_end(backend, kv, [letter] * 3)
    assert kv.admit(KVSequence([5, 5])) is None
    kv.check()


def test_slots_are_taken_when_they_are_needed_and_what_runs_goes_on() -> None:
    backend, kv = on_demand(count=8, movable=8)
    running = []
    for number, there in enumerate((1, 2, 4, 4, 8, 8, 8, 8)):
        running.append(run_to_end(backend, kv, [number] * (5 + number)))
        assert len(kv.places.slots) == there
        for sequence in running:
            assert held_tokens(backend, sequence) == sequence.tokens.tolist()
    kv.check()
    assert kv.admit(KVSequence([9])) is None
    assert kv.details()["rebuilds"] == 3


def test_a_burst_is_one_change() -> None:
    backend, kv = on_demand(count=8, movable=8)
    run_to_end(backend, kv, [1] * 5)
    kv.demand = 7
    run_to_end(backend, kv, [2] * 5)
    assert len(kv.places.slots) == 8
    assert kv.details()["rebuilds"] == 1


def test_slots_grow_at_once_where_there_would_be_no_room_to_move_more() -> None:
    backend, kv = on_demand(count=8, movable=3)
    for number, there in enumerate((1, 2, 8)):
        run_to_end(backend, kv, [number] * 64)
        assert len(kv.places.slots) == there


def test_a_steady_load_does_not_change_the_slots() -> None:
    now = 0.0
    backend, kv = on_demand(count=8, movable=8, clock=lambda: now)
    running = [run_to_end(backend, kv, [number] * 5) for number in range(5)]
    for turn in range(200):
        now += 1.0
        kv.release(running.pop(0))
        if turn % 7 == 0:
            kv.release(running.pop(0))
        kv.maintain(0.0)
        while len(running) < 5:
            running.append(run_to_end(backend, kv, [turn, len(running)] * 3))
    assert kv.details()["rebuilds"] == 3


def test_a_quiet_time_leaves_what_is_needed() -> None:
    now = 0.0
    backend, kv = on_demand(count=8, movable=8, clock=lambda: now)
    running = [run_to_end(backend, kv, [number] * 20) for number in range(8)]
    for sequence in running[1:]:
        kv.release(sequence)
    assert kv.upkeep_at() == 10.0
    now = 9.9
    kv.maintain(0.0)
    assert len(kv.places.slots) == 8
    for moment, there in ((10.0, 4), (20.0, 2)):  # two ran in the beginning of the first time, then one
        now = moment
        kv.maintain(0.0)
        assert len(kv.places.slots) == there
    assert held_tokens(backend, running[0]) == [0] * 20
    assert [kv.peek(array("i", [number] * 21).tobytes()) for number in range(8)] == [20] * 8
    assert kv.upkeep_at() is None
    kv.release(running[0])
    now = 30.0
    kv.maintain(0.0)
    kept = [number for number in range(8) if kv.peek(array("i", [number] * 21).tobytes())]
    assert len(kv.places.slots) * SLOT_BYTES + kv.places.store.bytes <= IDLE_BYTES
    assert kept == [0, 3, 4, 5, 6, 7] and len(kv.places.slots) == 1
    kv.check()
    assert kv.upkeep_at() is None


def test_slots_that_hold_something_stay_within_the_idle_size() -> None:
    now = 0.0
    backend, kv = on_demand(count=8, movable=8, idle_bytes=5 * SLOT_BYTES, clock=lambda: now)
    for sequence in [run_to_end(backend, kv, [number] * 20) for number in range(8)]:
        kv.release(sequence)
    now = 10.0
    kv.maintain(0.0)
    assert len(kv.places.slots) == 4
    # Whoever comes next finds them, and it takes a new quiet time to let go of them.
    now = 50.0
    run_to_end(backend, kv, [7] * 21)
    kv.maintain(0.0)
    assert len(kv.places.slots) == 4 and kv.upkeep_at() == 60.0


def unresizable(kv: SlotKVManager, sizes: set[int]) -> None:
    """There is no memory for so many slots."""
    ops: Any = kv.places.ops
    resize = ops.resize

    def fail(slots: int) -> None:
        if slots in sizes:
            ops._ops._cells = []
            raise BackendError(f"no memory for {slots}", fatal=True)
        resize(slots)

    ops.resize = fail


def test_without_memory_for_more_the_old_slots_are_taken_again() -> None:
    now = 0.0
    backend, kv = on_demand(clock=lambda: now)
    running = run_to_end(backend, kv, [1] * 9)
    unresizable(kv, {2, 4})
    late = KVSequence([2] * 5)
    for _ in range(3):
        assert kv.admit(late) is None
        assert held_tokens(backend, running) == [1] * 9
    kv.check()
    moved = kv.usage().moved_bytes
    del kv.places.ops.resize
    assert kv.admit(late) is None  # not at once
    assert kv.usage().moved_bytes == moved
    now = 31.0
    assert kv.admit(late) == 0
    assert held_tokens(backend, running) == [1] * 9
    kv.check()


def test_where_the_machine_has_no_room_for_more_slots_nothing_is_touched(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    backend, kv = on_demand(clock=lambda: now)
    running = run_to_end(backend, kv, [1] * 9)
    ops: Any = kv.places.ops
    ops.no_room = lambda slots: f"{slots} slots are too many"
    unresizable(kv, {1, 2, 4})
    before, usage = state_of(kv)[1:], kv.usage()
    for tries in range(1, 4):
        assert kv.admit(KVSequence([2] * 5)) is None
        assert state_of(kv)[1:] == before
        assert kv.usage() == usage._replace(upkeep_failures=tries)
        now += 31.0
    assert caplog.text.count("not enough memory for 2 slots instead of 1: 2 slots are too many") == 3
    del ops.no_room, ops.resize
    assert kv.admit(KVSequence([2] * 5)) == 0
    assert held_tokens(backend, running) == [1] * 9
    kv.check()


def test_when_no_slots_can_be_taken_at_all_the_memory_is_renewed() -> None:
    backend, kv = on_demand()
    running = run_to_end(backend, kv, [1] * 9)
    unresizable(kv, {1, 2})
    with pytest.raises(BackendError, match="cannot allocate 1 slots again: no memory for 1") as raised:
        kv.admit(KVSequence([2] * 5))
    assert raised.value.fatal
    backend.rebuild()
    kv.reset()
    assert not running.admitted
    kv.check()
    assert kv.admit(KVSequence([2] * 5)) == 0


@pytest.mark.parametrize("error", [BackendError("no"), MemoryError("no")])
def test_what_runs_and_cannot_be_saved_stays_where_it_is(error: Exception) -> None:
    backend, kv = on_demand()
    running = run_to_end(backend, kv, [1] * 9)
    failing(backend, "save", error)
    assert kv.admit(KVSequence([2] * 5)) is None
    assert len(kv.places.slots) == 1
    assert held_tokens(backend, running) == [1] * 9
    kv.check()


@pytest.mark.parametrize("error", [BackendError("no"), MemoryError("no")])
def test_what_runs_and_cannot_be_loaded_is_computed_again(error: Exception) -> None:
    backend, kv = on_demand()
    running = run_to_end(backend, kv, [1] * 9)
    failing(backend, "load", error)
    assert kv.admit(KVSequence([2] * 5)) == 0
    assert len(kv.places.slots) == 2
    assert running.num_computed == 0 and running.admitted
    kv.check()
    compute(backend, kv, running, 9)
    assert held_tokens(backend, running) == [1] * 9
    kv.check()


def test_a_twin_without_a_slot_waits_for_the_step_to_end() -> None:
    """The rows of a step go with the memory, and it is in the middle of one that twins begin."""
    backend, kv = on_demand()
    parent = run_to_end(backend, kv, [1, 2, 3])
    twin = KVSequence(parent.tokens)
    assert not kv.fork(parent, twin)
    assert len(kv.places.slots) == 1
    assert kv.admit(twin) == 2
    assert len(kv.places.slots) == 2


def test_a_picture_of_the_slots() -> None:
    backend, kv = on_demand(count=4, slot_tokens=200)
    for letter in range(3):
        kv.release(run_to_end(backend, kv, [letter, 7] * 35))
    running, short = (run_to_end(backend, kv, prompt) for prompt in ([4] * 130, [5]))
    view = kv.view()
    assert (view.layout, view.cell_tokens, view.cell_bytes, view.extent_cells) == ("slots", 64, 64 * 8, 4)
    assert view.resident.tolist() == [True, True, False, False]
    first, second = (sequence.number for sequence in view.sequences)
    cells = view.holders.reshape(4, 4).tolist()
    assert cells[running.slot] == [first] * 3 + [FREE]
    assert cells[short.slot] == [second] + [FREE] * 3
    assert not view.holders.reshape(4, 4)[2:].any()
    assert [(s.tokens, s.computed) for s in view.sequences] == [(130, 130), (1, 1)]
    assert [prefix.first_tokens[:2] for prefix in view.prefixes] == [(0, 7), (1, 7), (2, 7)]
    assert {(p.tokens, p.users, p.parent, len(p.first_tokens)) for p in view.prefixes} == {(70, 0, 0, 32)}
    assert view.prefixes_in_all == 3

    kv.release(running)
    view = kv.view()
    assert view.holders.reshape(4, 4)[0].tolist() == [first] * 3 + [FREE]
    assert first in {prefix.number for prefix in view.prefixes} and len(view.sequences) == 1


def test_a_position_mismatch_is_noticed() -> None:
    backend, kv = slots()
    sequence = run_to_end(backend, kv, [1, 2, 3])
    assert isinstance(backend.ops, SlotOps)
    backend.ops.remove(sequence.slot, 2)
    with pytest.raises(PositionMismatchError, match="holds 2 positions, but the sequence has 3"):
        kv.verify(sequence)


def test_slot_operations_of_the_fake_backend() -> None:
    backend, _ = slots()
    ops = backend.ops
    assert isinstance(ops, SlotOps)
    rows_of(backend, [Chunk(array("i", [1, 2, 3, 4]), 0, False, slot=0)])
    ops.copy(0, 1)
    ops.remove(0, 1, 3)
    ops.shift(0, 3, None, -2)
    assert ops.length(0) == 2 and ops.length(1) == 4


def failing(backend: FakeBackend, name: str, error: Exception) -> None:
    def fail(*args: Any) -> Any:
        raise error

    setattr(backend.ops, name, fail)


def test_a_block_that_cannot_be_copied_is_given_back() -> None:
    backend, kv = paged()
    parent = run_to_end(backend, kv, [1, 2, 3, 4, 5, 6])
    child = KVSequence(parent.tokens)
    assert kv.fork(parent, child)
    child.tokens.append(8)
    usage, *others = state_of(kv)
    failing(backend, "copy_blocks", BackendError("no copy"))
    with pytest.raises(BackendError, match="no copy"):
        kv.grow(child, 1)
    assert state_of(kv) == (usage._replace(peak=usage.peak + 1), *others)  # for a moment there was one more
    kv.check()


def saved_one() -> tuple[FakeBackend, SlotKVManager]:
    """A sequence in the store, and another one in the only slot."""
    backend, kv = slots(count=1, store_tokens=400)
    kv.release(run_to_end(backend, kv, [1] * 30))
    kv.release(run_to_end(backend, kv, [2] * 30))
    assert len(kv.places.store) == 1
    return backend, kv


@pytest.mark.parametrize("error", [BackendError("no"), MemoryError("no")])
def test_what_cannot_be_loaded_is_dropped_and_computed(error: Exception) -> None:
    backend, kv = saved_one()
    load = backend.ops.load  # type: ignore[union-attr]
    failing(backend, "load", error)
    again = KVSequence([1] * 31)
    assert kv.admit(again) == 0
    kv.check()
    assert kv.peek(array("i", [1] * 31).tobytes()) == 0
    backend.ops.load = load  # type: ignore[union-attr]
    compute(backend, kv, again, 31)
    assert held_tokens(backend, again) == [1] * 31


@pytest.mark.parametrize("error", [BackendError("no"), MemoryError("no")])
def test_what_cannot_be_saved_is_dropped(error: Exception) -> None:
    backend, kv = saved_one()
    failing(backend, "save", error)
    assert kv.admit(KVSequence([3] * 5)) == 0
    kv.check()
    assert kv.peek(array("i", [2] * 31).tobytes()) == 0
    assert kv.peek(array("i", [1] * 31).tobytes()) == 30


def test_what_cannot_be_copied_is_computed_and_a_twin_waits() -> None:
    backend, kv = slots(count=3)
    parent = run_to_end(backend, kv, [1, 2, 3, 4, 5])
    failing(backend, "copy", BackendError("no"))
    assert kv.admit(KVSequence([1, 2, 3, 4, 9])) == 0
    assert not kv.fork(parent, KVSequence(parent.tokens))
    kv.check()


def test_a_slot_that_cannot_be_emptied_puts_the_context_in_doubt() -> None:
    backend, kv = saved_one()
    failing(backend, "remove", BackendError("no"))
    with pytest.raises(BackendError, match="cannot empty slot 0") as raised:
        kv.admit(KVSequence([3] * 5))
    assert raised.value.fatal


def test_what_is_saved_survives_a_reset_only_if_its_account_is_sound() -> None:
    backend, kv = saved_one()
    running = KVSequence([4] * 5)
    assert kv.admit(running) == 0
    backend.rebuild()
    kv.reset()
    assert not running.admitted and running.num_computed == 0
    assert kv.peek(array("i", [1] * 31).tobytes()) == 30
    kv.places.store.bytes += 1
    kv.reset()
    assert kv.peek(array("i", [1] * 31).tobytes()) == 0
    kv.check()


def test_a_check_of_a_million_blocks_comes_in_small_slices() -> None:
    """Long edges, short ones, and free blocks: no slice looks at more than twice the blocks that it should."""
    kv = paged(blocks=1_000_000, block_size=1)[1]
    for number, count in enumerate([300_000, 40_000] + [3] * 4000):
        sequence = KVSequence([number, *range(count - 1)])
        assert kv.admit(sequence) is not None
        sequence.num_computed = count
        kv.release(sequence)
    slices = list(kv.check_in_slices())
    assert max(slices) < 2 * CHECK_SLICE
    assert sum(slices) > 1_000_000 + 350_000
    kv.arena.pool.free_map[999_999] = 0
    with pytest.raises(AssertionError, match=r"blocks \[999999\]"):
        list(kv.check_in_slices())


def test_the_cache_is_made_of_parts_not_of_parents() -> None:
    """At most an interface and what implements it."""
    for found in pkgutil.walk_packages(cllm.kv.__path__, "cllm.kv."):
        for cls in vars(importlib.import_module(found.name)).values():
            if isinstance(cls, type) and cls.__module__ == found.name:
                ours = [parent.__name__ for parent in cls.__mro__ if parent.__module__.startswith("cllm.kv.")]
                assert len(ours) <= 2, f"{cls.__name__} inherits from {ours[1:]}"
