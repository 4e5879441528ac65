from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.kv.eviction import LRU, EvictionPolicy, SegmentedLRU, make_policy


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


@pytest.mark.parametrize("name", ["lru", "slru"])
@given(items=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2)), unique_by=lambda item: item[0]))
def test_everything_comes_out_once(name: str, items: list[tuple[int, int]]) -> None:
    policy: EvictionPolicy[int] = make_policy(name)
    for item, hits in items:
        policy.add(item, hits)
        assert item in policy
    assert sorted(drain(policy)) == sorted(item for item, _ in items)  # type: ignore[arg-type]
