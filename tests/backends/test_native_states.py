"""Layers that carry a state, on the native engine: against plain numpy, to the bit however a text is cut and whatever
is computed beside it, and states that no step changes but the one that writes them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cllm._native import Engine, instruction_sets
from cllm.models.spec import LayerSpec, Mamba2Spec, ModelSpec, OpaqueStateSpec, ShortConvSpec
from layers_kit import load, random_weights, reference
from recurrence_kit import RECURRENT, StateRig
from step_kit import KV_TYPES, Floats, assert_same, quick, random_tokens

CLOSE = 1e-4
"""RMS of differences, in standard deviations of the logits. K and V are rounded to f16."""
WHOLE = ("qwen35", "lfm2", "granitehybrid", "nemotron_h", "falcon-h1", "mamba2")


def rms(found: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


@cache
def engine(name: str, instruction_set: str = "auto", threads: int = 2, q8: bool = True) -> tuple[ModelSpec, Engine]:
    spec = RECURRENT[name]
    return spec, load(spec, random_weights(spec), instruction_set=instruction_set, threads=threads, q8=q8)


@cache
def expected_logits(name: str, count: int) -> NDArray[np.float64]:
    spec = RECURRENT[name]
    return reference(spec, random_weights(spec), random_tokens(spec.n_vocab, count, seed=1))


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("name", RECURRENT)
def test_what_numpy_computes(name: str, instruction_set: str) -> None:
    spec, loaded = engine(name, instruction_set, q8=False)
    tokens = random_tokens(spec.n_vocab, 75, seed=1)
    found, expected = StateRig(spec, loaded).run(tokens, cuts=[40, 41, 60]), expected_logits(name, 75)
    assert rms(found, expected) < CLOSE
    assert np.abs(found - expected).max() < 20 * CLOSE * expected.std()


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("name", WHOLE)
def test_quantised_weights_and_kv(name: str, kv_type: str) -> None:
    spec, loaded = engine(name)
    found = StateRig(spec, loaded, kv_type=kv_type).run(random_tokens(spec.n_vocab, 75, seed=1), cuts=[50, 51])
    assert rms(found, expected_logits(name, 75)) < (0.12 if kv_type == "q4_0" else 0.05)


# --- bits ---


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("name", WHOLE)
def test_rows_depend_on_nothing_else(name: str, instruction_set: str) -> None:
    """In one chunk, token by token, among others, on several threads, whether logits are wanted or not."""
    spec, alone = engine(name, instruction_set, 1)
    tokens, other = random_tokens(spec.n_vocab, 62, seed=4), random_tokens(spec.n_vocab, 61, seed=5)
    expected = StateRig(spec, alone).run(tokens)
    for threads in (1, 3):
        rig = StateRig(spec, engine(name, instruction_set, threads)[1], seed=threads)
        assert_same(rig.run(tokens), expected, "in one chunk:")
        assert_same(rig.run(tokens, cuts=range(1, 62)), expected, "token by token:")
        assert_same(rig.run(tokens, cuts=[1, 17, 18, 49]), expected, "in chunks:")
        mine, beside = rig.begin(62), rig.begin(61)
        rig.step((mine, tokens[:20], 0), (beside, other[:47], 0))
        rig.step((beside, other[47:48], 1), (mine, tokens[20:40], 1))
        rig.step((mine, tokens[40:49], 0))
        assert_same(rig.step((mine, tokens[49:52], 2), (beside, other[48:50], 0)), expected[50:52], "some rows:")
        for at in range(52, 62):
            rows = rig.step((mine, tokens[at : at + 1], 1), (beside, other[at - 2 : at - 1], 1))
            assert_same(rows[:1], expected[at : at + 1], f"token {at} among others:")


@quick
@given(data=st.data())
def test_chunks_of_any_size(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(RECURRENT)), "model")
    kv_type = data.draw(st.sampled_from(KV_TYPES), "type")
    length = data.draw(st.integers(1, 90), "length")
    cuts = data.draw(st.lists(st.integers(1, 90), max_size=8), "cuts")
    spec, loaded = engine(name, q8=name in WHOLE)
    tokens = random_tokens(spec.n_vocab, length, seed=length)
    expected = StateRig(spec, loaded, kv_type=kv_type).run(tokens)
    assert_same(
        StateRig(spec, engine(name, threads=1, q8=name in WHOLE)[1], kv_type=kv_type).run(tokens, cuts), expected
    )


@pytest.mark.parametrize("name", WHOLE)
def test_several_go_on_from_one_state(name: str) -> None:
    """In one step and one after another, while the state that they read stays as it is."""
    spec, loaded = engine(name)
    tokens, others = random_tokens(spec.n_vocab, 50, seed=6), random_tokens(spec.n_vocab, 30, seed=7)
    rig = StateRig(spec, loaded)
    texts = [tokens[:32] + each for each in (others[:18], others[12:30], others[3:21])]
    expected = [rig.run(text)[32:] for text in texts]
    base = rig.begin(32)
    rig.step((base, tokens[:32], 0))
    shared, snapshot = list(base.state), rig.memory[base.state].copy()
    branches = []
    for _ in texts:
        branch = rig.begin(50)
        rig.engine.copy_blocks(np.array([*zip(base.blocks, branch.blocks, strict=False)], np.int32).reshape(-1, 2))
        branch.computed, branch.state = 32, list(shared)
        branches.append(branch)
    parts = [(branch, text[32:], 18) for branch, text in zip(branches[:2], texts, strict=False)]
    assert_same(rig.step(*parts, keeps=True), np.concatenate(expected[:2]), "together:")
    assert_same(rig.step((branches[2], texts[2][32:], 18), keeps=True), expected[2], "later:")
    assert np.array_equal(rig.memory[shared], snapshot)


@pytest.mark.parametrize("name", WHOLE)
def test_a_step_writes_nothing_but_what_is_its_own(name: str) -> None:
    spec, loaded = engine(name)
    rig, tokens = StateRig(spec, loaded), random_tokens(spec.n_vocab, 40)
    sequence = rig.begin(40)
    rig.step((sequence, tokens[:33], 0))
    before = rig.memory.copy()
    rig.step((sequence, tokens[33:], 1), keeps=True)
    changed = {int(cell) for cell in np.flatnonzero((rig.memory != before).any(-1))}
    assert changed <= {*sequence.state, *sequence.blocks}
    assert changed >= set(sequence.state)


def test_an_aborted_step_leaves_the_state_as_it_was() -> None:
    spec, loaded = engine("qwen35")
    tokens = random_tokens(spec.n_vocab, 4000, seed=8)
    rig = StateRig(spec, loaded, cells=2000)
    sequence = rig.begin(4000)
    rig.step((sequence, tokens[:100], 0))
    read, snapshot = sequence.state, rig.memory[sequence.state].copy()
    arrays = rig.arrays([(sequence, tokens[100:], 1)], [rig.state()])
    returned: list[bool] = []
    logits = np.empty((1, spec.n_vocab), np.float32)
    thread = threading.Thread(target=lambda: returned.append(loaded.step(*arrays, logits)))
    thread.start()
    while thread.is_alive():
        loaded.abort()
        thread.join(0.0005)
    assert returned == [False]
    assert np.array_equal(rig.memory[read], snapshot)
    again = rig.step((sequence, tokens[100:], 1))
    assert_same(again, rig.run(tokens, cuts=[100])[-1:])


@pytest.mark.parametrize("name", WHOLE)
def test_hidden_states_and_scores(name: str) -> None:
    spec, loaded = engine(name, q8=False)
    tokens = random_tokens(spec.n_vocab, 60, seed=1)
    rig = StateRig(spec, loaded)
    arrays = rig.arrays([(rig.begin(60), tokens, 1)], [rig.state()])
    targets, logprobs, hidden = np.array(tokens[1:], np.int32), np.empty(59), np.zeros((1, spec.n_embd))
    logits, wants = np.empty((1, spec.n_vocab), np.float32), np.array([[59, 1]], np.int32)
    tops = np.empty((59, 1), np.int32), np.empty((59, 1))
    assert loaded.read_prompts(*arrays, logits, wants, targets, logprobs, np.empty(59, np.int32), *tops, hidden)
    expected = expected_logits(name, 75)[:60]
    totals = np.log(np.exp(expected).sum(-1))
    assert np.abs(logprobs - (expected[np.arange(59), targets] - totals[:59])).max() < 0.01
    made = hidden @ random_weights(spec)[-1, "output"].T.astype(np.float64) * spec.logit_scale
    assert rms(made, expected[-1:]) < CLOSE


# --- what is refused ---


def test_wrong_cells_are_refused() -> None:
    spec, loaded = engine("lfm2")
    rig, tokens = StateRig(spec, loaded, cells=40), random_tokens(spec.n_vocab, 20)
    one, two = rig.begin(20), rig.begin(20)
    rig.step((one, tokens[:10], 0), (two, tokens[:10], 0))
    before = rig.memory.copy()
    mine, other, logits = rig.state(), rig.state(), np.empty((2, spec.n_vocab), np.float32)

    def refused(why: str, mine: Sequence[int], other: Sequence[int]) -> None:
        parts = [(one, tokens[10:11], 1), (two, tokens[10:11], 1)]
        with pytest.raises(ValueError, match=why):
            loaded.step(*rig.arrays(parts, [list(mine), list(other)]), logits)
        assert np.array_equal(rig.memory, before)

    refused("cell .* used by two states", mine, mine)
    refused("cell .* used by two states", one.state, other)
    refused("cell .* used by two states", mine, one.state)
    refused("block 40 is not one of", [40, *mine[1:]], other)
    refused("block -1 is not one of", mine, [*other[:-1], -1])
    refused("writes 0", mine, [])
    refused("writes", mine[:-1] if len(mine) > 1 else mine * 2, other)
    state, one.state = one.state, []
    refused("at position 10 reads a state of 0 cells", mine, other)
    one.state, one.computed = state, 0
    refused("at position 0 reads a state of", mine, other)


def test_tokens_cannot_be_dropped() -> None:
    spec, loaded = engine("lfm2")
    rig = StateRig(spec, loaded)
    sequence = rig.begin(40)
    rig.step((sequence, [1] * 20, 0))
    tokens, chunks, tables = rig.arrays([(sequence, [1], 1)], [rig.state()])
    chunks[0, 4:6] = 16, 16
    with pytest.raises(ValueError, match="state do not allow"):
        loaded.step(tokens, chunks, tables, np.empty((1, spec.n_vocab), np.float32))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"state_cells": 0}, "0 cells"),
        ({"state_cells": 1 << 30}, "cells"),
        ({"states": []}, "and 0 places"),
        ({"states": [(0, [(0, 0), (0, 256)])]}, "layer 1 has 2 parts"),
        ({"states": [(0, [(0, 0), (0, 256)]), (9, [])]}, "no layer 9"),
        ({"states": [(0, [(0, 0), (0, 256)]), (1, [(0, 512), (2, 0)])]}, "cell 2"),
        ({"states": [(0, [(0, 0), (0, 256)]), (1, [(0, 512), (0, 520)])]}, "byte 520"),
        ({"states": [(0, [(0, 0), (0, 256)]), (1, [(0, 512), (0, -64)])]}, "byte -64"),
        ({"states": [(0, [(0, 0), (0, 256)]), (1, [(0, 512), (0, 960)])]}, "byte 960"),
        ({"states": [(0, [(0, 0), (0, 256)]), (1, [(0, 512), (0, 192)])]}, "overlap"),
        ({"cell_bytes": 992}, "no multiple of 64"),
    ],
)  # fmt: skip
def test_impossible_layouts_are_refused(change: dict[str, Any], why: str) -> None:
    spec = replace(RECURRENT["lfm2"], layers=(LayerSpec(None, recurrence=ShortConvSpec(64, 3)),) * 2)
    spec = replace(spec, layers=tuple(replace(each, feed_forward=None) for each in spec.layers))
    loaded = load(spec, random_weights(spec))
    places = [(0, [(0, 0), (0, 256)]), (1, [(0, 512), (1, 0)])]
    right: dict[str, Any] = {"cell_bytes": 1024, "groups": [([], 1)], "state_cells": 2, "states": places}
    loaded.allocate(cells=4, block_size=16, type_k="f16", type_v="f16", **right)
    with pytest.raises(ValueError, match=why):
        loaded.allocate(cells=4, block_size=16, type_k="f16", type_v="f16", **right | change)


@pytest.mark.parametrize("name", WHOLE)
def test_every_tensor_of_a_spec_is_needed(name: str) -> None:
    spec = RECURRENT[name]
    weights = random_weights(spec)
    for missing in weights:
        rest = {key: values for key, values in weights.items() if key != missing}
        if missing in ((-1, "output"),) or missing[1] == "ssm_conv1d.bias":
            continue
        with pytest.raises(ValueError, match=f"{missing[1]}.* missing"):
            load(spec, rest)


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (Mamba2Spec(2, 24, 16, 1, 4), "24, no multiple of 16"),
        (Mamba2Spec(3, 32, 16, 2, 4), "no multiple of its key heads"),
        (Mamba2Spec(2, 32, 4096, 1, 4), "4096"),
        (ShortConvSpec(64, 1), "kernel is 1"),
        (ShortConvSpec(64, 40), "kernel is 40"),
        (OpaqueStateSpec(64), "OpaqueStateSpec"),
    ],
)
def test_impossible_recurrences_are_refused(of: Any, why: str) -> None:
    spec = replace(RECURRENT["mamba2"], layers=(LayerSpec(None, None, recurrence=of),))
    with pytest.raises((ValueError, AttributeError), match=why):
        Engine(instruction_set="auto", threads=1, spec=spec)


def test_small_matrices_of_every_kind() -> None:
    """A convolution's rows are shorter than any block: files have them as floats of some kind."""
    spec = RECURRENT["lfm2"]
    weights: dict[tuple[int, str], Floats] = random_weights(spec)
    halves = {name: values.astype(np.float16) for name, values in weights.items() if "conv.conv" in name[1]}
    rounded = weights | {name: values.astype(np.float32) for name, values in halves.items()}
    tokens = random_tokens(spec.n_vocab, 30)
    loaded = Engine(instruction_set="auto", threads=1, spec=spec)
    for (layer, role), values in (weights | halves).items():
        rows, cols = values.shape if values.ndim == 2 else (1, len(values))
        kind = 1 if values.dtype == np.float16 else 0
        loaded.load(layer, role, kind, rows, cols, np.ascontiguousarray(values).view(np.uint8).ravel())
    loaded.seal()
    assert_same(StateRig(spec, loaded).run(tokens), StateRig(spec, load(spec, rounded)).run(tokens))
