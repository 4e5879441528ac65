"""Exact bytes, and what a budget buys."""

from __future__ import annotations

import pytest

from cllm.errors import ConfigError
from cllm.kv.sizing import MIB, bytes_per_token, plan_blocks, plan_slots

SMOLLM2 = {"n_layers": 30, "n_kv_heads": 3, "head_dim_k": 64, "head_dim_v": 64}


@pytest.mark.parametrize(
    ("type_k", "type_v", "expected"),
    [("f16", "f16", 23_040), ("q8_0", "q8_0", 12_240), ("q4_0", "q4_0", 6_480), ("q8_0", "q4_0", 9_360)],
)
def test_bytes_per_token_counts_scales(type_k: str, type_v: str, expected: int) -> None:
    assert bytes_per_token(**SMOLLM2, type_k=type_k, type_v=type_v) == expected


def test_bytes_per_token_counts_kv_heads_not_query_heads() -> None:
    qwen3_8b = bytes_per_token(n_layers=36, n_kv_heads=8, head_dim_k=128, head_dim_v=128, type_k="f16", type_v="f16")
    assert qwen3_8b == 144 * 1024


def test_a_head_that_a_type_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"q4_0.*80.*f16"):
        bytes_per_token(n_layers=1, n_kv_heads=1, head_dim_k=80, head_dim_v=64, type_k="q4_0", type_v="f16")


def slots(budget_mib: float, *, context: int = 2048, running: int = 8, asked: bool = True, on_demand: bool = False):  # type: ignore[no-untyped-def]
    return plan_slots(
        budget_bytes=int(budget_mib * MIB),
        bytes_per_token=23_040,
        context=context,
        running=running,
        running_is_asked=asked,
        on_demand=on_demand,
    )


def test_a_large_budget_leaves_a_store() -> None:
    plan = slots(1000)
    assert plan.geometry.slots == 8 and plan.geometry.slot_tokens == 2048 and not plan.notes
    assert plan.geometry.tokens * 23_040 + plan.store_bytes == 1000 * MIB


def test_one_slot_is_taken_at_the_start_where_a_sequence_can_be_moved() -> None:
    for budget, first in ((8 * 45 + 46, 1), (8 * 45 + 44, 8)):
        plan = slots(budget, on_demand=True)
        assert plan.geometry.slots == 8 and plan.geometry.first == first
        assert plan.store_bytes == slots(budget).store_bytes
    assert slots(1000).geometry.first == 8


def test_a_small_budget_runs_fewer_and_says_so() -> None:
    plan = slots(100)
    assert plan.running == 2 and "n_seq_max is 2 instead of 8" in plan.notes[0]
    assert not slots(100, asked=False).notes


def test_a_tiny_budget_cuts_the_context_and_says_so() -> None:
    plan = slots(20)
    assert plan.running == 1 and plan.geometry.slot_tokens == 768
    assert "768 instead of 2048" in plan.notes[0]


def test_the_budget_is_never_passed() -> None:
    for budget in range(6, 400, 7):
        plan = slots(budget)
        assert plan.geometry.tokens * 23_040 + plan.store_bytes <= budget * MIB


def test_a_hopeless_budget_is_an_error_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_max_memory_mb is 1.0 MiB.*5.6 MiB"):
        slots(1)
    with pytest.raises(ConfigError, match="one block"):
        plan_blocks(budget_bytes=1000, bytes_per_token=23_040, block_size=16)
