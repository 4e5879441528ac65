"""Exact bytes, and what a budget buys."""

from __future__ import annotations

import pytest

from cllm.errors import ConfigError
from cllm.kv.sizing import MIB, plan_blocks, plan_slots
from cllm.models.spec import AttentionSpec, LayerSpec, Mamba2Spec, ModelSpec


def bytes_per_token(type_k: str, type_v: str, *layers: AttentionSpec) -> int:
    return ModelSpec("llama", 1, 1, 1, tuple(map(LayerSpec, layers))).kv_bytes_per_token(type_k, type_v)


@pytest.mark.parametrize(
    ("type_k", "type_v", "expected"),
    [("f16", "f16", 23_040), ("q8_0", "q8_0", 12_240), ("q4_0", "q4_0", 6_480), ("q8_0", "q4_0", 9_360)],
)
def test_bytes_per_token_counts_scales(type_k: str, type_v: str, expected: int) -> None:
    assert bytes_per_token(type_k, type_v, *[AttentionSpec(9, 3, 64, 64)] * 30) == expected


def test_bytes_per_token_counts_kv_heads_not_query_heads() -> None:
    qwen3_8b = [AttentionSpec(32, 8, 128, 128)] * 36
    assert bytes_per_token("f16", "f16", *qwen3_8b) == 144 * 1024


def test_bytes_per_token_are_those_of_every_layer() -> None:
    wide, narrow = AttentionSpec(8, 8, 64, 32), AttentionSpec(8, 1, 256, 256)
    assert bytes_per_token("f16", "f16", wide, narrow, narrow) == 2 * (8 * (64 + 32) + 2 * (256 + 256))


def test_a_head_that_a_type_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"q4_0.*80.*f16"):
        bytes_per_token("q4_0", "f16", AttentionSpec(1, 1, 80, 64))


@pytest.mark.parametrize("block_size", [1, 16, 24, 256])
@pytest.mark.parametrize("attentions", [0, 2])
def test_a_state_lies_in_cells_of_whole_tokens(block_size: int, attentions: int) -> None:
    """Also where no layer keeps K and V: a block of tokens then takes a cell that holds nothing."""
    mamba = LayerSpec(None, recurrence=Mamba2Spec(5, 24, 20, 1, kernel=4))
    spec = ModelSpec("mamba2", 1, 1, 1, (mamba,) * 3 + (LayerSpec(AttentionSpec(4, 2, 8, 8)),) * attentions)
    layout = spec.kv_layout("f16", "f16", block_size, apart=True)
    assert layout.token_bytes * block_size == layout.cell_bytes and layout.states is not None
    assert len(layout.groups[0].layers) == attentions and layout.local is None
    taken: dict[int, list[tuple[int, int]]] = {}
    for places in layout.states.places:
        for (cell, offset), size in zip(places, mamba.recurrence.state_parts, strict=True):  # type: ignore[union-attr]
            assert offset % 64 == 0 and offset + size <= layout.cell_bytes and cell < layout.states.cells
            assert all(offset >= end or offset + size <= begin for begin, end in taken.get(cell, ()))
            taken.setdefault(cell, []).append((offset, offset + size))
    assert len(taken) == layout.states.cells


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
