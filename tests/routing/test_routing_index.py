"""The index of what replicas have cached: against sets of names, under events, gaps, deaths, snapshots and a limit."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cllm.kv.block_names import NAME_BYTES, chain, root_name
from cllm.kv.events import KVEvent
from cllm.routing.index import EXPECTED_S, QUIET_S, PrefixIndex, short_hashes
from thorough import sampled

ROOT = root_name()


def prompt(*tokens: int) -> list[bytes]:
    """The names of blocks of one token each."""
    return chain(ROOT, b"".join(token.to_bytes(4, "little") for token in tokens), 1)


def matches(index: PrefixIndex, names: Sequence[bytes], now: float = 0.0) -> dict[str, int]:
    return {replica: blocks for blocks, replicas in index.lookup(short_hashes(names), now) for replica in replicas}


class Cache:
    """A replica's cache with its events: whatever it holds, it holds with all before it."""

    def __init__(self) -> None:
        self.held: set[tuple[int, ...]] = set()
        self.most = 0
        self.number = 1
        self.outbox: list[KVEvent] = []

    def store(self, tokens: tuple[int, ...]) -> None:
        new = [tokens[:end] for end in range(1, len(tokens) + 1) if tokens[:end] not in self.held]
        if new:
            self.held.update(new)
            self.most = max(self.most, len(self.held))
            self._tell("stored", tuple(prompt(*each)[-1] for each in new))

    def evict(self, draw: random.Random) -> None:
        ends = [each for each in self.held if not any(o[:-1] == each for o in self.held)]
        if ends:
            each = draw.choice(sorted(ends))
            self.held.remove(each)
            self._tell("removed", (prompt(*each)[-1],))

    def clear(self) -> None:
        self.held = set()
        self._tell("cleared", ())

    def names(self) -> set[bytes]:
        return {prompt(*each)[-1] for each in self.held}

    def leading(self, tokens: tuple[int, ...]) -> int:
        return max((end for end in range(len(tokens) + 1) if end == 0 or tokens[:end] in self.held), default=0)

    def _tell(self, kind: str, names: tuple[bytes, ...]) -> None:
        self.number += 1
        self.outbox.append(KVEvent(self.number, kind, names))  # type: ignore[arg-type]


NAMES = ("a", "b", "c")
REPLICAS = st.sampled_from(NAMES)
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)


class IndexMachine(RuleBasedStateMachine):
    """Claims are compared when all events have arrived: never too much, and exact unless something was forgotten."""

    limit = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.limit)
        self.caches: dict[str, Cache] = {}
        self.unknown: set[str] = set()
        self.draw = random.Random(0)
        for replica in NAMES:
            self.come_or_go(replica)
            self.send_snapshot(replica, False)

    @rule(replica=REPLICAS)
    def come_or_go(self, replica: str) -> None:
        if self.caches.pop(replica, None) is None:
            self.caches[replica] = Cache()
            self.index.add(replica, 0.0)
            self.unknown.add(replica)
        else:
            self.index.remove(replica)
            self.unknown.discard(replica)

    @rule(replica=REPLICAS, tokens=PROMPTS)
    def store(self, replica: str, tokens: tuple[int, ...]) -> None:
        if replica in self.caches:
            self.caches[replica].store(tokens)

    @rule(replica=REPLICAS)
    def evict(self, replica: str) -> None:
        if replica in self.caches:
            self.caches[replica].evict(self.draw)

    @rule(replica=REPLICAS)
    def clear(self, replica: str) -> None:
        if replica in self.caches:
            self.caches[replica].clear()

    @rule(replica=REPLICAS, twice=st.booleans())
    def deliver(self, replica: str, twice: bool) -> None:
        if replica in self.caches:
            cache = self.caches[replica]
            events, cache.outbox = cache.outbox, []
            for _ in range(1 + twice):
                self.index.apply(replica, events, 0.0)
            if any(event.kind == "cleared" for event in events):
                self.unknown.discard(replica)

    @rule(replica=REPLICAS, told=st.booleans(), tokens=PROMPTS)
    def lose(self, replica: str, told: bool, tokens: tuple[int, ...]) -> None:
        """Some events are lost; the replica says so, or the numbers do when the next one comes."""
        cache = self.caches.get(replica)
        if cache is not None:
            self.deliver(replica, False)
            cache.store(tokens)
            if not cache.outbox:
                cache.clear()
            cache.outbox = []
            self.unknown.add(replica)
            if told:
                self.index.apply(replica, [KVEvent(cache.number, "gap")], 0.0)
            else:
                cache.number += 1
                self.index.apply(replica, [KVEvent(cache.number, "removed", (bytes(NAME_BYTES),))], 0.0)

    @rule(replica=REPLICAS, late=st.booleans())
    def send_snapshot(self, replica: str, late: bool) -> None:
        """A late one arrives after events that are newer."""
        cache = self.caches.get(replica)
        if cache is not None:
            number, names = cache.number, cache.names()
            if late:
                cache.evict(self.draw)
                cache.store((0, 1, 0, 1, 1))
                self.deliver(replica, False)
            else:
                cache.outbox = []
            self.index.snapshot(replica, number, names, 0.0)
            self.unknown.discard(replica)

    @precondition(lambda self: self.caches)
    @rule(tokens=PROMPTS)
    def look(self, tokens: tuple[int, ...]) -> None:
        for replica in list(self.caches):
            self.deliver(replica, False)
        assert set(self.index.unknown()) == self.unknown
        truth = {
            replica: blocks
            for replica, cache in self.caches.items()
            if replica not in self.unknown and (blocks := cache.leading(tokens))
        }
        self.compare(matches(self.index, prompt(*tokens)), truth)

    def compare(self, found: dict[str, int], truth: dict[str, int]) -> None:
        assert found == truth

    @invariant()
    def counts_are_right(self) -> None:
        index = self.index
        holders = sum((mask >> 1).bit_count() for mask in index._held.values())
        assert holders == index.blocks <= index.most_blocks
        assert all(mask > 1 for mask in index._held.values())
        assert (
            sum(index.blocks_of(replica) for replica in self.caches) + sum(retired.blocks for retired in index._retired)
            == holders
        )


class CrowdedIndexMachine(IndexMachine):
    limit = 12

    def compare(self, found: dict[str, int], truth: dict[str, int]) -> None:
        assert all(blocks <= truth.get(replica, 0) for replica, blocks in found.items())

    @invariant()
    def who_never_has_more_than_its_share_loses_nothing(self) -> None:
        for replica, cache in self.caches.items():
            if replica not in self.unknown and not cache.outbox and cache.most <= self.limit // len(NAMES):
                assert self.index.blocks_of(replica) == len(cache.held)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=sampled(200), stateful_step_count=30, deadline=None)
TestCrowdedIndex = CrowdedIndexMachine.TestCase
TestCrowdedIndex.settings = settings(max_examples=sampled(200), stateful_step_count=30, deadline=None)


def known(*replicas: str, most_blocks: int = 1000) -> PrefixIndex:
    index = PrefixIndex(most_blocks)
    for replica in replicas:
        index.add(replica, 0.0)
        index.snapshot(replica, 0, (), 0.0)
    return index


def store(index: PrefixIndex, replica: str, number: int, names: Sequence[bytes], now: float = 0.0) -> None:
    index.apply(replica, [KVEvent(number, "stored", tuple(names))], now)


def test_a_quiet_replica_is_left_out_until_it_is_heard_again() -> None:
    index = known("a", "b")
    store(index, "a", 1, prompt(1, 2))
    store(index, "b", 1, prompt(1))
    index.apply("b", (), QUIET_S)
    assert matches(index, prompt(1, 2), QUIET_S) == {"a": 2, "b": 1}
    assert matches(index, prompt(1, 2), QUIET_S + 0.1) == {"b": 1}
    assert not index.knows("a", QUIET_S + 0.1) and index.knows("b", QUIET_S + 0.1)
    index.apply("a", (), QUIET_S + 1)
    assert matches(index, prompt(1, 2), QUIET_S + 1) == {"a": 2, "b": 1}


def test_what_is_being_computed_counts_for_a_while() -> None:
    index = known("a", "b")
    names = prompt(1, 2, 3)
    index.expect("a", short_hashes(names), 0.0)
    index.expect("b", short_hashes(names[:2]), 0.0)
    assert matches(index, names, EXPECTED_S) == {"a": 3, "b": 2}
    index.expect("b", short_hashes(names[:1]), 1.1 * EXPECTED_S)
    assert matches(index, names, 1.1 * EXPECTED_S) == {"a": 3, "b": 2}
    for replica in "ab":
        index.apply(replica, (), 9 * EXPECTED_S)
    assert matches(index, names, 2.2 * EXPECTED_S) == {"b": 1}
    assert matches(index, names, 9.0 * EXPECTED_S) == {}


def test_a_reused_slot_inherits_nothing() -> None:
    index = known("a", "b")
    names = prompt(1, 2, 3)
    store(index, "a", 1, names)
    index.expect("a", short_hashes(prompt(4)), 0.0)
    index.remove("a")
    assert matches(index, names) == {}
    index.add("c", 0.0)
    index.snapshot("c", 0, (), 0.0)
    index.apply("c", (), 0.0)
    assert matches(index, names) == matches(index, prompt(4)) == {}
    assert index.blocks == 0


def test_what_is_looked_up_is_kept_longest() -> None:
    index = known("a", most_blocks=64)
    for number in range(64):
        store(index, "a", number + 1, prompt(number))
    for number in range(64, 96):
        assert matches(index, prompt(0)) == {"a": 1}
        store(index, "a", number + 1, prompt(number))
    assert matches(index, prompt(1)) == {} and matches(index, prompt(95)) == {"a": 1}
    assert index.blocks <= 64


def test_a_large_replica_does_not_push_out_the_others() -> None:
    index = known("small", "large", most_blocks=100)
    for number in range(40):
        store(index, "small", number + 1, prompt(number))
    for number in range(1000):
        store(index, "large", number + 1, prompt(number + 500))
    assert index.blocks_of("small") == 40 and index.blocks <= 100


def test_storing_and_removing_forever_takes_no_more_memory() -> None:
    index = known("a")
    names = tuple(prompt(*range(50)))
    for number in range(0, 2000, 2):
        index.apply("a", [KVEvent(number + 1, "stored", names), KVEvent(number + 2, "removed", names)], 0.0)
    assert index.blocks == 0 == len(index._held)
    holding = index._replicas["a"].holding
    assert holding is not None and len(holding.order) < 2000


def test_events_that_wait_for_a_snapshot_are_bounded() -> None:
    index = known("a")
    names = tuple(random.Random(n).randbytes(NAME_BYTES) for n in range(1000))
    for number in range(2, 200):
        store(index, "a", number, names)
    assert index.unknown() == ["a"] and len(index._replicas["a"].waiting) < 70
    index.snapshot("a", 1, (), 0.0)
    assert index.unknown() == ["a"], "not all that came later was kept"
    index.snapshot("a", 199, names, 0.0)
    assert index.unknown() == [] and index.blocks_of("a") == 1000


def test_a_dead_replica_is_forgotten_a_little_at_a_time() -> None:
    index = known("a", "b", most_blocks=20_000)
    store(index, "a", 1, [random.Random(n).randbytes(NAME_BYTES) for n in range(5000)])
    index.remove("a")
    assert index.blocks == 5000
    index.apply("b", (), 0.0)
    assert 4000 < index.blocks < 5000
    for _ in range(30):
        index.apply("b", (), 0.0)
    assert index.blocks == 0


@pytest.mark.parametrize("replicas", [4, 300])
def test_memory_per_block(replicas: int) -> None:
    blocks = 30_000
    tracemalloc.start()
    try:
        index = known(*(str(number) for number in range(replicas)), most_blocks=blocks)
        draw = random.Random(0)
        for number in range(2 * blocks // 100):
            names = [draw.randbytes(NAME_BYTES) for _ in range(100)]
            store(index, str(number % replicas), number // replicas + 1, names)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert blocks * 0.9 < index.blocks <= blocks
    assert taken < 250 * blocks + 2000 * replicas
