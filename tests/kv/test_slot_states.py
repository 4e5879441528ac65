"""The slots manager where sequences carry a state, which cannot be rewound: snapshots, and what is computed again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from cllm.backends.base import Chunk
from cllm.backends.fake import FakeBackend
from cllm.errors import BackendError, UnsupportedOperationError
from cllm.kv.manager import KVManager
from cllm.kv.pins import PinMark
from cllm.kv.sequence import KVSequence
from cllm.kv.slots import packing
from cllm.kv.slots.manager import SlotKVManager
from cllm.kv.slots.snapshots import Snapshots
from kv_kit import ManagerMachine, compute, held_tokens
from state_slots_kit import STATE_BYTES, state_slots
from step_of import rows_of
from thorough import sampled


class WithPlaces(KVSequence):
    """Others go on behind every 2."""

    @property
    def places(self) -> list[int]:  # type: ignore[override]
        return [index + 1 for index, token in enumerate(self.tokens) if token == 2]


def run(backend: FakeBackend, kv: SlotKVManager, prompt: list[int], answer: list[int] = []) -> tuple[KVSequence, int]:  # noqa: B006
    """As the planner does it: chunks end where a snapshot is due. Returns how many tokens were computed, too."""
    sequence = WithPlaces(prompt)
    assert kv.admit(sequence) is not None
    computed = 0
    for token in [None, *answer]:
        if token is not None:
            sequence.tokens.append(token)
        while rest := len(sequence.tokens) - sequence.num_computed:
            count = sequence.until_stop(rest, 1)
            compute(backend, kv, sequence, count)
            computed += count
    return sequence, computed


def message(letter: int, tokens: int = 19) -> list[int]:
    return [*([letter] * tokens), 2]


class StateMachine(ManagerMachine):
    """Prompts of two letters, and a third that ends messages."""

    def __init__(self) -> None:
        super().__init__()
        self.kv.places.snapshots.apart = 2  # no prompt here is long

    def build(self) -> tuple[FakeBackend, KVManager]:
        return state_slots(eviction_threshold=0.8, max_sequences=6)

    def check_found(self, cached: int, expected: int) -> None:
        assert cached <= expected  # more slots may have taken the room of what was saved

    @rule(prompt=st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=50))
    def admit_messages(self, prompt: list[int]) -> None:
        sequence = WithPlaces(prompt)
        if self.kv.admit(sequence) is not None:
            assert sequence.num_computed < len(prompt)
            self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def advance_to_the_stop(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if rest := len(sequence.tokens) - sequence.num_computed:
            compute(self.backend, self.kv, sequence, sequence.until_stop(rest, 1))

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data())
    def meet(self, data: st.DataObject) -> None:
        running, waiting = data.draw(st.lists(st.sampled_from(self.live), min_size=2, max_size=2))
        self.kv.meet(running, waiting)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        length = data.draw(st.integers(0, sequence.num_computed))
        assert self.kv.truncate(sequence, length) == sequence.num_computed <= length

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(16, 40))
    def pin(self, data: st.DataObject, tokens: int) -> None:
        self.kv.pin(data.draw(st.sampled_from(self.live)), PinMark(tokens))

    @rule()
    def unpin(self) -> None:
        for name in [*self.kv.places.pins.by_id][:1]:
            self.kv.unpin(name)


class FewSlots(StateMachine):
    """Slots come when they are needed, there is room for few states, and sequences are saved all the time."""

    def build(self) -> tuple[FakeBackend, KVManager]:
        self.now = 0.0
        options = {"release_after_s": 10.0, "idle_bytes": 1000, "clock": lambda: self.now}
        return state_slots(3, at_start=1, store_sequences=1, **options)

    @rule(seconds=st.sampled_from([1.0, 11.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds


_profile = settings(max_examples=sampled(60), stateful_step_count=40, deadline=None)
for _machine in (StateMachine, FewSlots):
    _machine.TestCase.settings = _profile


TestStates = StateMachine.TestCase
TestFewSlots = FewSlots.TestCase

SYSTEM, USER, OTHER, ANSWER = message(0), message(1), message(3), [4] * 6


def test_the_next_turn_goes_on_from_the_end_of_the_answer() -> None:
    backend, kv = state_slots(slot_tokens=200)
    first, computed = run(backend, kv, SYSTEM + USER, ANSWER)
    kv.release(first)
    assert computed == 46
    _, computed = run(backend, kv, SYSTEM + USER + ANSWER + [2] + OTHER)
    assert computed == 21, "what is new, and nothing else"


def test_an_answer_that_is_stripped_and_a_message_that_was_edited_cost_what_follows_their_boundary() -> None:
    backend, kv = state_slots(slot_tokens=200)
    for given, expected in (
        (SYSTEM + USER + [4] * 3, 43),
        (SYSTEM + USER + OTHER, 20),
        (SYSTEM + OTHER, 20),
        (SYSTEM + USER + OTHER + USER, 20),
        (SYSTEM + USER + OTHER + OTHER, 20),
        (SYSTEM + USER[:-1] + [3, 2] + OTHER, 41),
    ):
        sequence, computed = run(backend, kv, given, ANSWER)
        assert computed == expected + len(ANSWER)
        kv.check()
        kv.release(sequence)


def test_who_shares_a_text_without_boundaries_computes_it_twice_at_most() -> None:
    backend, kv = state_slots(slot_tokens=200)
    computed = []
    for letter in range(4):
        sequence, count = run(backend, kv, [7] * 100 + [letter] * 20)
        kv.release(sequence)
        computed.append(count)
    assert computed == [120, 120, 20, 20]


def test_who_waits_for_a_beginning_goes_on_where_it_parts() -> None:
    backend, kv = state_slots(slot_tokens=200)
    running, waiting = WithPlaces([7] * 100 + [1] * 20), WithPlaces([7] * 100 + [3] * 20)
    assert kv.admit(running) == 0
    kv.meet(running, waiting)
    assert running.until_stop(120, 1) == 100, "not at 112, which is for the same prompt again"
    while running.num_computed < 100:
        compute(backend, kv, running, running.until_stop(120 - running.num_computed, 1))
    assert running.num_computed == 100
    assert kv.admit(waiting) == 100
    for sequence in (running, waiting):
        compute(backend, kv, sequence, 20)
        assert held_tokens(backend, sequence) == sequence.tokens.tolist()


def test_the_same_prompt_again_costs_less_than_a_block() -> None:
    backend, kv = state_slots(slot_tokens=200)
    first, _ = run(backend, kv, [7] * 100)
    assert kv.peek(first.tokens.tobytes()) == 96
    second, computed = run(backend, kv, [7] * 100)
    assert computed == 4 and second.slot != first.slot


def test_a_fork_and_a_preempted_sequence_go_on_where_they_were() -> None:
    backend, kv = state_slots(slot_tokens=200)
    parent, _ = run(backend, kv, SYSTEM + USER)
    child = WithPlaces(parent.tokens)
    assert kv.fork(parent, child) and child.num_computed == 40
    parent.tokens.append(5)
    compute(backend, kv, parent, 1)
    kv.release(parent)
    again = WithPlaces([*parent.tokens, 6])
    assert kv.admit(again) == 41
    child.tokens.append(9)
    compute(backend, kv, child, 1)
    kv.release(child)
    assert kv.peek(KVSequence([*child.tokens, 0]).tokens.tobytes()) == 41


def test_a_step_that_went_too_far_costs_what_follows_the_last_snapshot() -> None:
    backend, kv = state_slots(slot_tokens=200)
    sequence, _ = run(backend, kv, SYSTEM + USER)
    sequence.tokens.extend([5, 6, 7])
    compute(backend, kv, sequence, 1)
    rows_of(backend, [Chunk(sequence.tokens[41:], 41, True, sequence.slot)])
    with pytest.raises(Exception, match="holds 43 positions"):
        kv.verify(sequence)
    kv.rewind(sequence)
    kv.verify(sequence)
    assert sequence.num_computed == 40
    compute(backend, kv, sequence, 3)
    assert kv.truncate(sequence, 19) == 0 and backend.memory.length(sequence.slot) == 0
    kv.check()


def test_what_cannot_be_done_is_refused() -> None:
    backend, kv = state_slots(slot_tokens=200)
    sequence, _ = run(backend, kv, SYSTEM + USER)
    with pytest.raises(UnsupportedOperationError, match=r"cannot remove positions \[4, 20\): the state cannot be cut"):
        kv.remove_range(sequence, 4, 20)
    assert sequence.num_computed == 40 and sequence.intact


def test_a_pinned_beginning_needs_its_state() -> None:
    backend, kv = state_slots(slot_tokens=200)
    sequence, _ = run(backend, kv, SYSTEM + USER, ANSWER)
    for tokens, refused in ((20, False), (46, False), (30, True)):
        mark = PinMark(tokens)
        kv.pin(sequence, mark)
        assert bool(mark.refusal) is refused
        if refused:
            assert "the state behind its last token is not kept" in str(mark.refusal)
    kv.release(sequence, keep=False)
    for letter in range(20):
        kv.release(run(backend, kv, [10 + letter] * 150)[0])
    kv.check()
    assert kv.peek(KVSequence(SYSTEM + OTHER).tokens.tobytes()) == 20


def test_a_pinned_beginning_keeps_its_state_when_another_pin_that_shares_it_goes() -> None:
    backend, kv = state_slots(slot_tokens=200, pin_limit=0.75)
    sequence, _ = run(backend, kv, SYSTEM + USER, ANSWER)
    for tokens in (20, 46):
        kv.pin(sequence, PinMark(tokens))
    kv.release(sequence, keep=False)
    first, second = kv.places.pins.by_id
    kv.unpin(second)
    for expected in (20, 0):
        while kv.places.snapshots.give_up_oldest():
            pass
        kv.check()
        assert kv.peek(KVSequence(SYSTEM + OTHER).tokens.tobytes()) == expected
        kv.unpin(first)


def test_an_admission_that_ends_in_doubt_costs_no_saved_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, kv = state_slots(1, slot_tokens=200)
    for letter in (1, 4):
        kv.release(run(backend, kv, SYSTEM + message(letter))[0])
    assert len(kv.places.store) == 1

    def fail(*_: object) -> None:
        raise BackendError("stuck")

    with monkeypatch.context() as broken:
        broken.setattr(backend.memory, "remove", fail)
        with pytest.raises(BackendError, match="cannot empty slot 0"):
            kv.admit(WithPlaces(SYSTEM + message(1) + USER))
    backend.memory.remove(0, 0)
    kv.reset()
    kv.check()
    assert kv.peek(KVSequence(SYSTEM + message(1) + USER).tokens.tobytes()) == 40


def test_snapshots_stay_within_the_store() -> None:
    backend, kv = state_slots(slot_tokens=200, store_sequences=2)
    places = kv.places
    for letter in range(8):
        for turns in range(1, 9):
            prompt = [each for turn in range(turns) for each in message(letter + turn)]
            kv.release(run(backend, kv, prompt)[0])
            kv.check()
            assert places.evictable_bytes + places.reserved_bytes <= places.store_bytes
            assert places.snapshots.bytes <= places.store_bytes // 2, "what is saved needs room, too"
    assert all(len(entry.snapshots) <= places.snapshots.most for entry in [*places.store, *places.held_in_slots()])
    assert places.snapshots.bytes == STATE_BYTES * len(places.snapshots) > 0


def test_a_snapshot_that_cannot_be_taken_or_put_back_costs_computing_only(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, kv = state_slots(slot_tokens=200)
    ops = backend.memory

    def fail(*_: object) -> None:
        raise BackendError("no")

    with monkeypatch.context() as patch:
        patch.setattr(ops, "snapshot", fail)
        kv.release(run(backend, kv, SYSTEM + USER)[0])
        assert not len(kv.places.snapshots)
    kv.release(run(backend, kv, OTHER + USER)[0])
    with monkeypatch.context() as patch:
        patch.setattr(ops, "restore", fail)
        _, computed = run(backend, kv, OTHER + SYSTEM)
        assert computed == 40
    kv.check()


@pytest.mark.parametrize(
    ("candidates", "needed", "expected"),
    [
        ([], [], []),
        ([990], [], [990]),
        ([*range(100, 1000, 100)], [], [900, 800, 700, 500, 200, 100]),
        ([*range(100, 1000, 100)], [333], [900, 800, 700, 500, 333, 200, 100]),
        ([5, 8, 1000], [7], [1000, 7]),
    ],
)
def test_where_snapshots_are_taken(candidates: list[int], needed: list[int], expected: list[int]) -> None:
    snapshots = Snapshots(1 << 20, 1 << 10)
    assert snapshots.most == 16
    assert snapshots.choose(candidates, needed, 0, 1000) == expected
    assert snapshots.choose(candidates, needed, 600, 1000) == [place for place in expected if place > 616]


def test_a_sequence_and_its_snapshots_are_one_piece_on_disk() -> None:
    saved = np.arange(50, dtype=np.uint8)
    states = {place: np.full(place, place, np.uint8) for place in (3, 5, 7, 9)}
    payload = packing.pack(saved, 9, states)
    for damaged in (payload[:7], payload[:40], np.full(40, 255, np.uint8)):
        with pytest.raises(ValueError, match="its snapshots"):
            packing.unpack(damaged.copy())
    tokens, found = packing.unpack(payload)
    assert tokens == 9 and payload.tolist() == saved.tolist()
    assert {place: state.tolist() for place, state in found.items()} == {n: [n] * n for n in (3, 7, 9)}
