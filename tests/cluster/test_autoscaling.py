"""How many replicas a load needs: enough, no more, and the same number again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.cluster.autoscaling import KV_USE, QueueAndKVPolicy, Targets, desired_replicas

TARGETS = Targets(requests=10.0, kv_use=0.8)

counts = st.integers(1, 200)
loads = st.floats(0, 5000)
uses = st.lists(st.floats(0, 1), max_size=40)


@pytest.mark.parametrize(
    ("current", "requests", "kv_uses", "desired"),
    [
        (1, 0, [], 1),
        (1, 10, [], 1),
        (1, 11, [], 2),
        (3, 100, [], 10),
        (1, 0, [0.8], 1),
        (1, 0, [0.81], 2),
        (4, 0, [0.9, 0.9, 0.9, 0.9], 5),
        (2, 0, [1.0, 0.0], 2),
        (5, 0, [], 1),
        (2, 9, [], 2),  # one would be at 0.9 of its target: too near to it
        (2, 8, [], 1),
        (10, 60, [], 8),
        (3, 24, [0.1, 0.1, 0.1], 3),
    ],
)
def test_examples(current: int, requests: float, kv_uses: list[float], desired: int) -> None:
    assert desired_replicas(current, requests, kv_uses, TARGETS) == desired


@given(counts, loads, uses)
def test_enough_and_never_more_than_needed(current: int, requests: float, kv_uses: list[float]) -> None:
    desired = desired_replicas(current, requests, kv_uses, TARGETS)
    assert desired >= 1
    assert requests / desired <= TARGETS.requests + 1e-6
    assert sum(kv_uses) / desired <= TARGETS.kv_use + 1e-6
    if desired > max(current, 1):
        fewer = desired - 1
        assert requests / fewer > TARGETS.requests - 1e-6 or sum(kv_uses) / fewer > TARGETS.kv_use - 1e-6


@given(counts, loads, uses)
def test_a_steady_load_settles_at_once(current: int, requests: float, kv_uses: list[float]) -> None:
    desired = desired_replicas(current, requests, kv_uses, TARGETS)
    assert desired_replicas(desired, requests, kv_uses, TARGETS) == desired


@given(counts, loads, uses)
def test_what_was_added_is_not_removed_while_the_load_falls_a_little(
    current: int, requests: float, kv_uses: list[float]
) -> None:
    desired = desired_replicas(current, requests, kv_uses, TARGETS)
    if desired > current:
        assert desired_replicas(desired, requests * 0.85, [use * 0.85 for use in kv_uses], TARGETS) == desired


@given(counts, loads, loads, uses, st.floats(0, 1))
def test_more_load_never_needs_fewer(
    current: int, requests: float, more: float, kv_uses: list[float], use: float
) -> None:
    least = desired_replicas(current, requests, kv_uses, TARGETS)
    assert desired_replicas(current, requests + more, kv_uses, TARGETS) >= least
    assert desired_replicas(current, requests, [*kv_uses, use], TARGETS) >= least


@pytest.mark.parametrize(("figures", "desired"), [(None, 3), ({}, 3), ({KV_USE: {"a": 0.9, "b": 0.9, "c": 0.9}}, 4)])
def test_what_ray_tells(figures: Any, desired: int) -> None:
    policy = QueueAndKVPolicy(target_requests=10.0, target_kv_use=0.8)
    context = SimpleNamespace(aggregated_metrics=figures, target_num_replicas=3, total_num_requests=30.0)
    assert policy(context) == (desired, {})
