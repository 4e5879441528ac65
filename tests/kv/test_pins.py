"""Prefixes that stay: what is pinned is found until its time is up, within the limit, and nobody is kept out by it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from cllm.backends.fake import FakeBackend
from cllm.kv.manager import KVManager
from cllm.kv.pins import PinMark
from cllm.kv.radix import COMMON_SPACE
from cllm.kv.sequence import KVSequence
from cllm.kv.sizing import most_bytes
from cllm.kv.slots.manager import SlotKVManager
from kv_kit import BYTES_PER_TOKEN, compute, on_demand, paged, run_to_end, slots
from pin_kit import PinMachine, SlotPinMachine, pinned
from thorough import sampled

LONG = list(range(100, 124))
MAKERS = {"paged": paged, "slots": lambda **options: slots(store_tokens=200, max_sequences=5, **options)}


def flood(kv: KVManager, backend: FakeBackend, first: int) -> None:
    """Other prompts, one after the other, enough to evict all that may be."""
    for number in range(first, first + 20):
        kv.release(run_to_end(backend, kv, list(range(1000 + 40 * number, 1030 + 40 * number))))
        kv.maintain(0.0)


class OnDemandPinMachine(PinMachine):
    """The budget is never passed, with pins in it and slots that come and go."""

    limit = 0.9

    def build(self) -> tuple[FakeBackend, KVManager]:
        return on_demand(pin_limit=self.limit, clock=lambda: self.now)

    def note_who_gave_way(self, *, allowed: bool) -> None:
        super().note_who_gave_way(allowed=True)  # for more slots

    def forget(self) -> None:
        pass


_profile = settings(max_examples=sampled(40), stateful_step_count=40, deadline=None)
for _machine in (PinMachine, SlotPinMachine, OnDemandPinMachine):
    _machine.TestCase.settings = _profile
TestPagedPins = PinMachine.TestCase
TestSlotPins = SlotPinMachine.TestCase
TestOnDemandPins = OnDemandPinMachine.TestCase


@pytest.fixture(params=sorted(MAKERS))
def make(request: pytest.FixtureRequest) -> Any:
    return MAKERS[request.param]


def test_what_is_pinned_stays_whatever_comes(make: Any) -> None:
    backend, kv = make(pin_limit=0.9)
    mark = pinned(kv, backend, LONG)
    flood(kv, backend, 0)
    assert mark.pin_id and mark.pinned_tokens == len(LONG)
    assert kv.peek(KVSequence([*LONG, 1]).tokens.tobytes()) == len(LONG)
    kv.unpin(mark.pin_id)
    flood(kv, backend, 20)
    kv.check()
    assert kv.peek(KVSequence([*LONG, 1]).tokens.tobytes()) == 0


def test_a_pin_ends_with_its_time_unless_it_is_renewed(make: Any) -> None:
    now = 0.0
    backend, kv = make(pin_limit=0.9, clock=lambda: now)
    first = pinned(kv, backend, LONG, ttl_s=10.0)
    now = 8.0
    again = pinned(kv, backend, LONG, ttl_s=10.0)
    assert first.pin_id == again.pin_id and kv.usage().pins == 1
    now = 17.9
    kv.maintain(0.0)
    assert kv.usage().pins == 1 and kv.details()["pins"]["prefixes"][0]["uses"] == 2
    now = 18.0
    kv.maintain(0.0)
    assert kv.usage().pins == 0 and kv.details()["pins"]["expired"] == 1


def test_what_is_over_the_limit_is_refused_with_numbers_for_the_operator(make: Any) -> None:
    backend, kv = make(pin_limit=0.0)
    sequence = run_to_end(backend, kv, LONG)
    for source, has_numbers in (("request", False), ("warm", True)):
        mark = PinMark(len(LONG), source=source)
        kv.pin(sequence, mark)
        assert mark.pin_id is None and mark.refusal is not None and "kv.pin_limit" in mark.refusal
        assert ("of the 0 that kv.pin_limit allows" in mark.refusal) is has_numbers
    assert kv.usage().pins_refused == 2


def test_pins_with_the_same_beginning_count_it_once() -> None:
    backend, kv = paged(blocks=16, pin_limit=0.5)
    pinned(kv, backend, LONG)
    pinned(kv, backend, [*LONG[:16], *range(8)])
    usage = kv.usage()
    assert (usage.pins, usage.pinned) == (2, 8)


def test_a_pin_gives_way_to_a_request_that_needs_all_there_is() -> None:
    backend, kv = paged(blocks=16, pin_limit=0.9)
    pinned(kv, backend, LONG)
    whole = run_to_end(backend, kv, list(range(64)))
    kv.check()
    assert kv.usage().pins == 0 and kv.details()["pins"]["gave_way"] == 1
    kv.release(whole)


def test_nobody_who_runs_is_a_reason_for_a_pin_to_go() -> None:
    backend, kv = paged(blocks=16, pin_limit=0.5)
    pinned(kv, backend, LONG)
    running = run_to_end(backend, kv, list(range(20)))
    assert kv.admit(KVSequence(list(range(200, 260)))) is None
    assert kv.usage().pins == 1
    kv.release(running)


def test_a_sequence_that_was_not_computed_is_not_pinned(make: Any) -> None:
    backend, kv = make(pin_limit=0.9)
    sequence = KVSequence(LONG)
    kv.admit(sequence)
    compute(backend, kv, sequence, 20)
    mark = PinMark(len(LONG))
    kv.pin(sequence, mark)
    assert mark.refusal is not None and "not fully computed" in mark.refusal
    kv.release(sequence)
    kv.check()


def test_slots_can_still_be_taken_when_pins_are_in_the_way() -> None:
    backend, kv = on_demand(movable=2, pin_limit=0.9)
    assert isinstance(kv, SlotKVManager)
    pinned(kv, backend, list(range(60)))
    running = run_to_end(backend, kv, list(range(100, 160)))
    kv.demand = 2
    other = run_to_end(backend, kv, list(range(200, 260)))
    kv.check()
    assert most_bytes(60, BYTES_PER_TOKEN) * 2 > kv.places.store_bytes * 0.9
    assert len(kv.places.slots) == 2
    for sequence in (running, other):
        kv.release(sequence)


def pin_for(kv: KVManager, backend: FakeBackend, space: bytes, first: int, length: int = 12, **mark: Any) -> PinMark:
    sequence = KVSequence(range(first, first + length), space=space)
    assert kv.admit(sequence) is not None
    compute(backend, kv, sequence, length - sequence.num_computed)
    wish = PinMark(length, **mark)
    kv.pin(sequence, wish)
    kv.release(sequence)
    kv.check()
    return wish


def test_a_space_that_has_more_than_its_part_gives_it_up_to_others() -> None:
    backend, kv = paged(blocks=48, pin_limit=0.25)  # 12 blocks of 4 tokens
    greedy = [pin_for(kv, backend, b"ann", 100 * number, ttl_s=100.0 + number) for number in range(5)]
    assert [mark.pin_id is not None for mark in greedy] == [True] * 4 + [False]
    assert pin_for(kv, backend, b"bob", 0).pin_id and pin_for(kv, backend, b"bob", 100).pin_id
    over = pin_for(kv, backend, b"bob", 200)
    assert over.refusal is not None and "kv.pin_limit" in over.refusal
    held = {pin["id"] for pin in kv.details()["pins"]["prefixes"]}
    assert [mark.pin_id in held for mark in greedy[:4]] == [False, False, True, True]  # those that end soonest went
    assert pin_for(kv, backend, b"eve", 0).pin_id
    assert kv.details()["pins"]["gave_way"] == 3


def test_what_is_warm_on_purpose_is_nobodys_part() -> None:
    backend, kv = paged(blocks=48, pin_limit=0.25)
    for number in range(4):
        assert pin_for(kv, backend, COMMON_SPACE, 100 * number, source="warm").pin_id
    assert pin_for(kv, backend, b"ann", 0).pin_id  # what it shares with what is warm costs nothing
    assert pin_for(kv, backend, b"ann", 500).refusal
    assert kv.usage().pins == 5 and kv.details()["pins"]["gave_way"] == 0


def test_with_local_layers_a_pin_holds_what_they_need_to_go_on() -> None:
    backend, kv = paged(blocks=60, window=5)

    class Marked(KVSequence):
        places = (20,)

    text = list(range(20))
    for again in range(2):
        sequence = Marked([*text, *range(50 + 20 * again, 65 + 20 * again)])
        assert kv.admit(sequence) == 20 * again
        while (missing := len(sequence.tokens) - sequence.num_computed) > 0:
            compute(backend, kv, sequence, min(missing, sequence.room - sequence.num_computed))
        mark = PinMark(20)
        kv.pin(sequence, mark)
        assert mark.refusal is None and mark.pinned_tokens == 20
        kv.release(sequence)
        kv.room.evict(1000)
        kv.check()
        assert kv.usage().pinned == 5 + 2 and kv.usage().evictable == 0
    late = KVSequence(list(range(100, 140)))
    assert kv.admit(late) == 0
    compute(backend, kv, late, 16)
    compute(backend, kv, late, 16)
    mark = PinMark(8)
    kv.pin(late, mark)
    assert mark.refusal == "layers with a window or a state have gone beyond its end"
    kv.release(late)
    assert kv.unpin(mark_id(kv))
    kv.check()
    assert kv.usage().pinned == 0


def mark_id(kv: Any) -> str:
    (pin,) = kv.pins.all.by_id
    return str(pin)
