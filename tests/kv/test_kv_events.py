"""What the tree tells of itself, against what is in it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from cllm.backends.fake import FakeBackend
from cllm.kv.block_names import chain, root_name
from cllm.kv.events import KVEvents
from cllm.kv.manager import KVManager
from cllm.kv.paged.manager import PagedKVManager
from kv_kit import paged, run_to_end
from pin_kit import SPACES, PinMachine
from thorough import sampled


def names_in(kv: PagedKVManager) -> set[bytes]:
    """From the tokens that the tree spells, made anew."""
    names: list[bytes] = []
    for node in kv.arena.prefixes.tree.nodes():
        space, last = None, b""
        for part in reversed(list(node.path())):
            if part.space != space:  # the root's, or where a space goes on from what is common
                last, space = root_name(part.space, last), part.space
            made = chain(last, bytes(part.key), kv.unit_tokens)
            last = made[-1]
        names += made
    assert len(names) == len(set(names))
    return set(names)


class EventMachine(PinMachine):
    """Somebody keeps a picture by events alone, and makes it anew after a gap; another one never misses anything."""

    def build(self) -> tuple[FakeBackend, KVManager]:
        backend, kv = paged(blocks=10, block_size=2, pin_limit=self.limit, clock=lambda: self.now)
        self.short, self.long = kv.arena.events.listen(3), kv.arena.events.listen(100_000)
        self.pictures: dict[str, set[bytes]] = {"short": set(), "long": set()}
        self.seen = {"short": kv.arena.events.number, "long": kv.arena.events.number}
        return backend, kv

    def read(self, who: str) -> None:
        picture = self.pictures[who]
        for event in getattr(self, who).take():
            if event.kind == "gap":
                assert who == "short"
                number, names = self.kv.held_names()
                assert number >= event.number
                self.seen[who] = number
                picture.clear()
                picture.update(names)
                continue
            if event.number <= self.seen[who]:
                continue
            assert event.number == self.seen[who] + 1 or event.kind == "cleared"
            self.seen[who] = event.number
            if event.kind == "cleared":
                picture.clear()
            elif event.kind == "stored":
                assert not picture.intersection(event.names)
                assert event.parent in picture or event.parent in {root_name(space) for space in SPACES}
                picture.update(event.names)
            else:
                assert picture.issuperset(event.names)
                picture.difference_update(event.names)

    @rule(who=st.sampled_from(["short", "long"]))
    def look(self, who: str) -> None:
        assert isinstance(self.kv, PagedKVManager)
        self.read(who)
        assert self.pictures[who] == names_in(self.kv)

    @invariant()
    def names_are_those_of_the_tokens(self) -> None:
        assert isinstance(self.kv, PagedKVManager)
        assert self.kv.held_names()[1] == names_in(self.kv)
        usage = self.kv.usage()
        assert usage.blocks_stored - usage.blocks_removed >= len(names_in(self.kv))


EventMachine.TestCase.settings = settings(max_examples=sampled(40), stateful_step_count=40, deadline=None)
TestEvents = EventMachine.TestCase


def test_names_are_the_same_after_a_restart() -> None:
    found = []
    for _ in range(2):
        backend, kv = paged()
        kv.release(run_to_end(backend, kv, list(range(12))))
        found.append(kv.held_names()[1])
    assert found[0] == found[1] and len(found[0]) == 3


def test_a_listener_that_does_not_keep_up_finds_a_gap_and_then_what_follows() -> None:
    events = KVEvents()
    listener = events.listen(2)
    for name in (b"a", b"b", b"c", b"d"):
        events.stored(b"", [name])
    assert [(event.kind, event.number) for event in listener.take()] == [("gap", 4)]
    events.removed([b"a"])
    assert [(event.kind, event.names) for event in listener.take()] == [("removed", (b"a",))]
    for name in (b"e", b"f", b"g"):
        events.stored(b"", [name])
    events.cleared()
    assert [(event.kind, event.number) for event in listener.take()] == [("cleared", 9)]


def test_who_is_gone_is_told_nothing() -> None:
    events = KVEvents()
    listener = events.listen()
    assert len(events._listeners) == 1
    del listener
    assert len(events._listeners) == 0


def test_what_a_window_takes_out_of_the_tree_is_told() -> None:
    backend, kv = paged(blocks=8, block_size=4)
    listener = kv.arena.events.listen()
    sequence = run_to_end(backend, kv, list(range(30)))
    assert kv.remove_range(sequence, 4, 12)  # there is no room for a copy: what follows leaves the tree
    kv.shift(sequence, 12, -8)
    kv.check()
    told = listener.take()
    stored, removed = (
        {name for event in told if event.kind == kind for name in event.names} for kind in ("stored", "removed")
    )
    assert len(stored) == 7 and len(removed) == 6
    assert stored - removed == kv.held_names()[1] == names_in(kv)
    kv.release(sequence)
