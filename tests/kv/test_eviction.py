from __future__ import annotations

from math import inf, nextafter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cllm.kv.eviction import (
    BONUS,
    LRU,
    POLICIES,
    EvictionClock,
    EvictionPolicy,
    SegmentedLRU,
    Worth,
    computing,
    make_policy,
)


def drain(policy: EvictionPolicy[str]) -> list[str]:
    order = []
    while len(policy):
        order.append(policy.peek())
        policy.remove(order[-1])
    return order


def test_lru_gives_the_oldest_first() -> None:
    policy: LRU[str] = LRU()
    for item in "abc":
        policy.add(item, 0)
    policy.remove("a")
    policy.add("a", 1)
    assert drain(policy) == ["b", "c", "a"]


def test_segmented_lru_spares_what_was_found_again() -> None:
    policy: SegmentedLRU[str] = SegmentedLRU()
    policy.add("system prompt", 3)
    for item in "abc":
        policy.add(item, 0)
    assert drain(policy) == ["a", "b", "c", "system prompt"]


@pytest.mark.parametrize("name", POLICIES)
@given(items=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2)), unique_by=lambda item: item[0]))
def test_everything_comes_out_once(name: str, items: list[tuple[int, int]]) -> None:
    policy: EvictionPolicy[int] = make_policy(name)
    for item, hits in items:
        policy.add(item, hits, worth=float(hits))
        assert item in policy
    assert sorted(drain(policy)) == sorted(item for item, _ in items)  # type: ignore[arg-type]


Doublings = st.integers(-8, 8)
Ranks = st.integers(-8, 24).map(lambda eighths: eighths / 8)

# -- worth -------------------------------------------------------------------------------------------------------------


def test_what_is_worth_little_goes_first() -> None:
    policy: Worth[str] = Worth()
    for item, worth in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("d", 1.0)):
        policy.add(item, 0, worth)
    assert drain(policy) == ["b", "d", "c", "a"]


def test_what_is_worth_much_grows_old() -> None:
    """Whatever it is worth, it goes when everything was replaced often enough."""
    clock = EvictionClock()
    policy: Worth[int] = Worth(clock)
    policy.add(0, 0, worth=1024.0)
    went = []
    for item in range(1, 30):
        clock.advance(1 / 8)
        policy.add(item, 0, worth=1.0)
        went.append(policy.peek())
        policy.remove(went[-1])
    assert went.index(0) == 7  # ten doublings, a tenth for each


def test_equal_worth_goes_as_with_lru() -> None:
    policies: list[EvictionPolicy[str]] = [Worth(), LRU()]
    for policy in policies:
        for item in "abcd":
            policy.add(item, 0, worth=2.0)
        for item in "bd":
            policy.remove(item)
            policy.add(item, 0, worth=2.0)
    assert drain(policies[0]) == drain(policies[1]) == ["a", "c", "b", "d"]


def test_tokens_cost_more_further_back() -> None:
    assert computing(0, 100) + computing(100, 300) == pytest.approx(computing(0, 300))
    assert computing(70_000, 70_100) > 2 * computing(0, 100)


class WorthMachine(RuleBasedStateMachine):
    """Two policies with one clock, against dictionaries."""

    @initialize()
    def begin(self) -> None:
        self.clock = EvictionClock()
        self.policies: list[Worth[int]] = [Worth(self.clock), Worth(self.clock)]
        self.expected: list[dict[int, tuple[float, int, float]]] = [{}, {}]
        """The rank of each item, its number, and the clock when it was used."""
        self.number = 0

    def put(self, which: int, item: int, rank: float, since: float) -> None:
        self.number += 1
        self.expected[which][item] = rank, self.number, since

    @rule(eighths=st.integers(1, 8))
    def time_passes(self, eighths: int) -> None:
        self.clock.advance(eighths / 8)

    @rule(which=st.integers(0, 1), item=st.integers(0, 30), doublings=Doublings, after=st.none() | Ranks)
    def use(self, which: int, item: int, doublings: int, after: float | None) -> None:
        policy, now = self.policies[which], self.clock.now
        if item in policy:
            policy.remove(item)
            del self.expected[which][item]
        rank = now + BONUS * doublings
        after = -inf if after is None else after
        rank = max(rank, nextafter(after, inf))
        assert policy.add(item, 0, 2.0**doublings, after) == rank > after
        self.put(which, item, rank, now)

    @precondition(lambda self: any(self.expected))
    @rule(data=st.data(), doublings=Doublings, most=Ranks)
    def revalue(self, data: st.DataObject, doublings: int, most: float) -> None:
        which = data.draw(st.sampled_from([which for which in (0, 1) if self.expected[which]]))
        item = data.draw(st.sampled_from(sorted(self.expected[which])))
        rank, _, since = self.expected[which][item]
        self.policies[which].revalue(item, 2.0**doublings, most)
        if (new := min(since + BONUS * doublings, most)) != rank:
            self.put(which, item, new, since)

    @precondition(lambda self: any(self.expected))
    @rule()
    def evict(self) -> None:
        which = 0 if self.policies[0].rank() <= self.policies[1].rank() else 1
        item = self.order(which)[0]
        assert self.policies[which].peek() == item
        self.policies[which].remove(item)
        assert self.expected[which].pop(item)[0] <= self.policies[which].rank()

    def order(self, which: int) -> list[int]:
        return sorted(self.expected[which], key=lambda item: self.expected[which][item][:2])

    @invariant()
    def order_is_that_of_ranks(self) -> None:
        for which, policy in enumerate(self.policies):
            assert list(policy) == self.order(which)
            assert len(policy) == len(self.expected[which])
            assert len(policy._heap) <= 2 * len(policy) + 65


TestWorth = WorthMachine.TestCase
