"""What the slots manager tells of what it holds, in whole blocks, against what is in its index."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from cllm.backends.fake import FakeBackend
from cllm.kv.block_names import chain, root_name
from cllm.kv.events import Listener
from cllm.kv.manager import KVManager
from cllm.kv.slots.manager import SlotKVManager
from kv_kit import on_demand, paged, run_to_end, slots
from pin_kit import SPACES, SlotPinMachine
from thorough import sampled

SIZE = 2


def names_in(kv: SlotKVManager) -> set[bytes]:
    """From the tokens that the index spells, made anew."""
    names: set[bytes] = set()
    for entry, _ in kv.places.index.examine():
        if entry is not None:
            spelled = b"".join(bytes(node.key) for node in reversed(list(entry.path())))
            names.update(chain(root_name(entry.space), spelled, SIZE))
    return names


def follow(listener: Listener, picture: set[bytes]) -> None:
    for event in listener.take():
        if event.kind == "cleared":
            picture.clear()
        elif event.kind == "stored":
            assert not picture.intersection(event.names)
            assert event.parent in picture or event.parent in {root_name(space) for space in SPACES}
            picture.update(event.names)
        else:
            assert event.kind == "removed" and picture.issuperset(event.names)
            picture.difference_update(event.names)


class SlotEventMachine(SlotPinMachine):
    """Somebody keeps a picture by events alone."""

    def make(self) -> tuple[FakeBackend, SlotKVManager]:
        options = {"store_tokens": 120, "pin_limit": self.limit, "block_tokens": SIZE, "clock": lambda: self.now}
        return slots(count=3, **options)  # type: ignore[arg-type]

    def build(self) -> tuple[FakeBackend, KVManager]:
        backend, kv = self.make()
        self.listener, self.picture = kv.places.events.listen(100_000), set[bytes]()
        return backend, kv

    @rule(length=st.integers(1, 30))
    def a_sequence_is_cut(self, length: int) -> None:
        if self.live and self.live[0].intact and length < self.live[0].num_computed - 1:
            self.kv.truncate(self.live[0], length)
            del self.live[0].tokens[length:]

    @invariant()
    def the_picture_is_right(self) -> None:
        assert isinstance(self.kv, SlotKVManager)
        follow(self.listener, self.picture)
        number, names = self.kv.held_names()
        assert self.picture == names == names_in(self.kv) and number == self.kv.places.events.number
        usage = self.kv.usage()
        assert usage.blocks_stored - usage.blocks_removed == len(names)


class OnDemandEventMachine(SlotEventMachine):
    def make(self) -> tuple[FakeBackend, SlotKVManager]:
        return on_demand(pin_limit=self.limit, block_tokens=SIZE, clock=lambda: self.now)

    def note_who_gave_way(self, *, allowed: bool) -> None:
        super().note_who_gave_way(allowed=True)


for _machine in (SlotEventMachine, OnDemandEventMachine):
    _machine.TestCase.settings = settings(max_examples=sampled(40), stateful_step_count=40, deadline=None)
TestSlotEvents = SlotEventMachine.TestCase
TestOnDemandEvents = OnDemandEventMachine.TestCase


@pytest.mark.parametrize("tokens", [7, 8])
def test_slots_and_blocks_have_the_same_names(tokens: int) -> None:
    found = []
    for backend, kv in (paged(block_size=4), slots(block_tokens=4)):
        kv.release(run_to_end(backend, kv, list(range(tokens))))
        found.append(kv.held_names()[1])
    assert found[0] == found[1] and len(found[0]) == tokens // 4


def test_what_several_hold_is_told_once() -> None:
    backend, kv = slots(block_tokens=4)
    listener = kv.places.events.listen()
    first, second = (run_to_end(backend, kv, [*range(8), last, 0, 0, 0]) for last in (8, 9))
    assert [(event.kind, len(event.names)) for event in listener.take()] == [("stored", 3), ("stored", 1)]
    kv.release(first, keep=False)
    kv.release(second, keep=False)
    assert [(event.kind, len(event.names)) for event in listener.take()] == [("removed", 1), ("removed", 3)]
    assert kv.held_names()[1] == set()
