"""K/V and weights in small types, rows that are computed alone, and beginnings that rows share: in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch

from cllm.backends.torch import reference
from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import StepBatch, make_batch
from cllm.backends.torch.linear import dequantise, quantise_rows
from cllm.backends.torch.model import Layer, Model, Weights
from cllm.backends.torch.operations import PlainOperations
from cllm.backends.torch.reference import Attention
from cllm.backends.torch.rotations import rotation_table
from cllm.backends.torch.shared_prefixes import (
    FEWEST_ROWS,
    LEAST_TOKENS,
    Groups,
    find_shared,
    find_shared_in,
    packed_size,
    unpacked,
)
from cllm.kv.ops import BlockGeometry, Move
from spec_kit import make_spec
from torch_kit import BLOCK, chunk, random_tokens

CPU = torch.device("cpu")
SPEC = make_spec(2, 64, 6, 2, 32, 96, 320, qkv_bias=True, qk_norm="head")
ATTENTION, N_FF = SPEC.layers[0].attention, SPEC.layers[0].feed_forward.size


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def random_weights(*, fp8: bool) -> Weights:
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) * columns**-0.5

    def layer() -> Layer:
        made = Layer(
            attention_norm=torch.rand(SPEC.n_embd),
            qkv=matrix(ATTENTION.qkv_size, SPEC.n_embd),
            qkv_bias=torch.randn(ATTENTION.qkv_size),
            q_norm=torch.rand(ATTENTION.head_dim_k),
            k_norm=torch.rand(ATTENTION.head_dim_k),
            output=matrix(SPEC.n_embd, ATTENTION.q_size),
            ffn_norm=torch.rand(SPEC.n_embd),
            gate_up=matrix(2 * N_FF, SPEC.n_embd),
            down=matrix(SPEC.n_embd, N_FF),
        )
        if fp8:
            made.scales = {}
            for name in ("qkv", "output", "gate_up", "down"):
                quantised, made.scales[name] = quantise_rows(getattr(made, name))
                setattr(made, name, quantised)
        return made

    layers = [layer() for _ in range(SPEC.n_layers)]
    head, scales = matrix(SPEC.n_vocab, SPEC.n_embd), None
    if fp8:
        head, scales = quantise_rows(head)
    return Weights(torch.randn(SPEC.n_vocab, SPEC.n_embd), layers, torch.rand(SPEC.n_embd), head, scales)


def arena_of(kv_type: str, blocks: int = 16) -> Arena:
    return Arena(SPEC, BlockGeometry(blocks, BLOCK), kv_type)


def batch_of(*chunks: Any) -> StepBatch:
    return make_batch(chunks, BLOCK, CPU)


# -- K and V ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_type", "limit"), [("f32", 1e-6), ("f16", 1e-3), ("bf16", 8e-3), ("int8", 1e-2), ("fp8", 5e-2)]
)
def test_attention_over_small_types_is_near_the_exact_one(kv_type: str, limit: float) -> None:
    torch.manual_seed(0)
    tokens = 40
    keys, values = torch.randn(2, tokens, ATTENTION.n_kv_heads, ATTENTION.head_dim_k)
    values[3] *= 0.01
    queries = torch.randn(tokens, ATTENTION.n_heads, ATTENTION.head_dim_k)
    batch = batch_of(chunk(range(tokens), 0, [5, 2, 9]))
    attention = Attention(ATTENTION, 1e-5, rotation_table(None, ATTENTION.head_dim_k, tokens))
    attended = []
    for each in (kv_type, "f32"):
        arena = arena_of(each)
        reference.store(keys, values, arena.layers[1], batch.slots)
        attended.append(reference.attend(queries, attention, batch, arena.layers[1]))
    assert float((attended[0] - attended[1]).norm() / attended[1].norm()) < limit


def test_what_does_not_fit_into_fp8_is_cut_off_and_zeros_stay_zero() -> None:
    batch = batch_of(chunk([1, 2], 0, [3]))
    vectors = torch.tensor([[1e6, -1e6] * 16, [0.0] * 32]).view(2, 1, 32).expand(2, ATTENTION.n_kv_heads, 32)
    for kv_type, largest in (("fp8", 448.0), ("int8", 1e6)):
        arena = arena_of(kv_type)
        memory = arena.layers[0]
        reference.store(vectors, vectors, memory, batch.slots)
        for plane, scales in ((memory.keys, memory.key_scales), (memory.values, memory.value_scales)):
            stored = plane[3].float()
            if scales is not None:
                stored *= scales[3].float()[..., None]
            assert torch.allclose(stored[:, 0].abs(), torch.tensor(largest), rtol=1e-3)
            assert not stored[:, 1].any()


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "f32", "fp8", "int8"])
def test_an_arena_takes_what_was_reckoned(kv_type: str) -> None:
    assert arena_of(kv_type).nbytes == 16 * BLOCK * SPEC.kv_bytes_per_token(kv_type, kv_type)


@pytest.mark.parametrize("kv_type", ["fp8", "int8"])
def test_blocks_are_copied_and_moved_with_their_scales(kv_type: str) -> None:
    arena = arena_of(kv_type)
    marks = torch.arange(16, dtype=torch.uint8)
    for part in (arena.data, arena.scales):
        if part is not None:
            part.view(torch.uint8).copy_(marks.view(16, *[1] * (part.dim() - 1)).expand(part.view(torch.uint8).shape))
    arena.copy([(0, 5), (1, 6)])
    arena.move([Move(8, 7, 3)])
    expected = [0, 1, 2, 3, 4, 0, 1, 8, 9, 10, 10, 11, 12, 13, 14, 15]
    for part in (arena.data, arena.scales):
        if part is not None:
            assert part.view(torch.uint8).flatten(1)[:, 0].tolist() == expected
            assert part.view(torch.uint8).flatten(1)[:, -1].tolist() == expected


# -- weights ---------------------------------------------------------------------------------------------------------


def test_rows_in_fp8_are_near_and_independent() -> None:
    torch.manual_seed(0)
    weight = torch.randn(20, 64) * torch.logspace(-4, 4, 20)[:, None]
    weight[7] = 0
    quantised, scales = quantise_rows(weight)
    error = (dequantise(quantised, scales, torch.float32) - weight).norm(dim=1)
    assert (error <= 0.04 * weight.norm(dim=1)).all()
    pieces = [quantise_rows(piece) for piece in weight.split(6)]
    assert torch.equal(torch.cat([piece.view(torch.uint8) for piece, _ in pieces]), quantised.view(torch.uint8))
    assert torch.equal(torch.cat([scale for _, scale in pieces]), scales)


def test_a_model_in_fp8_computes_with_what_its_weights_stand_for() -> None:
    quantised, wide = random_weights(fp8=True), random_weights(fp8=True)
    for layer in wide.layers:
        assert layer.scales is not None
        for name, scales in layer.scales.items():
            setattr(layer, name, dequantise(getattr(layer, name), scales, torch.float32))
        layer.scales = None
    assert wide.head_scales is not None
    wide.head, wide.head_scales = dequantise(wide.head, wide.head_scales, torch.float32), None
    batch = batch_of(chunk(random_tokens(30), 0, [1, 2]), chunk(random_tokens(9, 1), 0, [3]))
    logits = [
        Model(SPEC, weights, PlainOperations(), 512).forward(batch, arena_of("f32")) for weights in (quantised, wide)
    ]
    assert torch.equal(*logits)
    exact = Model(SPEC, random_weights(fp8=False), PlainOperations(), 512).forward(batch, arena_of("f32"))
    assert 1e-3 < float((logits[0] - exact).norm() / exact.norm()) < 0.2


# -- a row by itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_type", "fp8"), [("f32", False), ("int8", False), ("fp8", True)])
def test_invariant_logits_are_the_same_bits_alone_among_others_and_in_any_chunk(kv_type: str, fp8: bool) -> None:
    model = Model(SPEC, random_weights(fp8=fp8), PlainOperations(), 512, invariant=True)
    tokens, blocks, arena = random_tokens(50), [4, 2, 7, 1], arena_of(kv_type)

    def run(*chunks: Any) -> torch.Tensor:
        return model.forward(batch_of(*chunks), arena)

    def piece(first: int, last: int) -> Any:
        return chunk(tokens[first:last], first, blocks)

    def others() -> Sequence[Any]:
        return chunk(random_tokens(20, 1), 0, [10, 11]), chunk([5], 3, [12])

    run(piece(0, 49))
    alone = run(piece(49, 50))
    assert torch.equal(run(*others(), piece(49, 50))[2:], alone)
    assert torch.equal(run(piece(0, 50)), alone)
    run(piece(0, 17), *others())
    assert torch.equal(run(piece(17, 50), *others())[:1], alone)


# -- beginnings that rows share --------------------------------------------------------------------------------------


def check_groups(tables: Any, lengths: Any, groups: Any) -> int:
    """Whoever is in a group begins like the others of it. Gives the number of splits that need not be read."""
    saved, seen = 0, set[int]()
    for members, extent in zip(groups.members, groups.extents.tolist(), strict=True):
        rows = members[members >= 0]
        assert (len(rows) > 0) == (extent > 0) and not seen & set(rows.tolist())
        seen |= set(rows.tolist())
        if extent:
            blocks = extent * groups.split // BLOCK
            assert (tables[rows, :blocks] == tables[rows[0], :blocks]).all()
            assert (lengths[rows] > extent * groups.split).all() and (groups.firsts[rows] == extent).all()
            saved += extent * (len(rows) - 1)
    assert not groups.firsts[[row for row in range(len(groups.firsts)) if row not in seen]].any()
    return saved


def rows_of(*groups: tuple[int, int], length: int = 2100) -> tuple[Any, Any]:
    """Groups given as (rows, tokens that they share), in any order."""
    rows = sum(count for count, _ in groups)
    tables = np.random.default_rng(0).permutation(rows * 140).astype(np.int32).reshape(rows, 140)
    first = 0
    for count, tokens in groups:
        tables[first : first + count, : tokens // BLOCK] = tables[first, : tokens // BLOCK]
        first += count
    return np.random.default_rng(1).permutation(tables), np.full(rows, length, np.int32)


@pytest.mark.parametrize(
    ("groups", "saved"),
    [
        ([(64, 2048)], 60 * 8),
        ([(8, 2048), (20, 1024), (5, 2048), (9, 256)], 7 * 8 + 18 * 4),
        ([(16, LEAST_TOKENS), (16, LEAST_TOKENS - BLOCK)], 15 * 2),
        ([(40, 2240)], 37 * 8),  # the same to the end: one split is left to each
    ],
)
def test_rows_that_share_enough_are_found(groups: list[tuple[int, int]], saved: int) -> None:
    tables, lengths = rows_of(*groups)
    found = find_shared(tables, lengths, BLOCK, 4096)
    assert found is not None and check_groups(tables, lengths, found) == saved
    padded = find_shared(tables, lengths, BLOCK, 4096, rows=128)
    assert padded is not None and len(padded.firsts) == 128
    words = np.zeros(packed_size(128), np.int32)
    padded.pack(words)
    members, extents, firsts, split = astuple(unpacked(torch.from_numpy(words), 128, 4096))
    used = len(padded.extents)
    assert not extents[used:].any() and split == padded.split
    parts = Groups(members[:used].numpy(), extents[:used].numpy(), firsts.numpy(), split)
    assert check_groups(tables, lengths, parts) == saved


def test_deeper_groups_are_found_within_wider_ones() -> None:
    tables, lengths = rows_of((40, 512))
    tables[:20, :64] = tables[0, :64]
    found = find_shared(tables, lengths, BLOCK, 4096)
    assert found is not None and check_groups(tables, lengths, found) == 18 * 4 + 18 * 2


def test_nothing_is_made_of_too_few_rows_or_tokens_or_of_odd_blocks() -> None:
    for groups in ([(FEWEST_ROWS - 1, 2048)], [(64, LEAST_TOKENS - BLOCK)], [(64, 0)]):
        assert find_shared(*rows_of(*groups), BLOCK, 4096) is None
    assert find_shared(*rows_of((64, 2048)), 24, 4096) is None
    assert find_shared(*rows_of((64, 2048), length=LEAST_TOKENS), BLOCK, 4096) is None


def test_rows_in_one_list_are_looked_at_alike() -> None:
    tables, lengths = rows_of((30, 1024), (6, 0))
    lengths -= np.arange(len(lengths), dtype=np.int32) * 7
    used = -(-lengths // BLOCK)
    table = np.concatenate([row[:count] for row, count in zip(tables, used, strict=True)])
    begins = np.concatenate([[0], np.cumsum(used)]).astype(np.int32)
    found, expected = find_shared_in(table, begins, lengths, BLOCK, 4096), find_shared(tables, lengths, BLOCK, 4096)
    assert found is not None and expected is not None
    assert all(np.array_equal(*pair) for pair in zip(found[:3], expected[:3], strict=True))
    tables, lengths = rows_of((30, 0))
    assert find_shared_in(tables.ravel(), np.arange(31, dtype=np.int32) * 140, lengths, BLOCK, 4096) is None
