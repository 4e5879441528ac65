"""Layers that differ, on the native engine: every feature of a spec against plain numpy, K/V in groups of cells, and
windows shorter than the text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cllm._native import Engine, instruction_sets
from cllm.models.spec import ModelSpec
from layers_kit import FEATURES, MODELS, PLAIN, GroupRig, load, random_weights, reference, with_attention
from step_kit import KV_TYPES, assert_same, quick, random_tokens
from thorough import some

CLOSE = 1e-4
"""RMS of differences, in standard deviations of the logits. Both sides round K and V to f16, a few to neighbours."""


def far(found: NDArray[Any], expected: NDArray[Any]) -> float:
    assert np.abs(found - expected).max() < 20 * CLOSE * expected.std()
    return rms(found, expected)


def rms(found: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_alone(feature: str, instruction_set: str) -> None:
    spec = FEATURES[feature]
    weights, tokens = random_weights(spec), random_tokens(spec.n_vocab, 75, seed=1)
    expected = reference(spec, weights, tokens)
    rig = GroupRig(spec, load(spec, weights, instruction_set=instruction_set, threads=2))
    assert far(rig.all_logits(tokens, cuts=[40, 41, 60]), expected) < CLOSE
    if feature != "other sizes":
        plain = reference(PLAIN, random_weights(PLAIN), tokens)
        assert rms(plain, expected) > 100 * CLOSE, "without the feature, the same would come out"


@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "groups"])
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("name", MODELS)
def test_whole_models(name: str, instruction_set: str, grouped: bool) -> None:
    spec = MODELS[name](33)
    weights, tokens = random_weights(spec), random_tokens(spec.n_vocab, 330, seed=2)
    rig = GroupRig(spec, load(spec, weights, instruction_set=instruction_set, threads=2), grouped=grouped)
    assert far(rig.all_logits(tokens, cuts=[100, 290, 291, 292]), reference(spec, weights, tokens)) < CLOSE


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_quantised_weights_and_kv(name: str, kv_type: str) -> None:
    """Layers of other sizes take their inputs from the same buffers; keys are shifted and spread by layer."""
    spec = MODELS[name](33)
    weights, tokens = random_weights(spec), random_tokens(spec.n_vocab, 200, seed=3)
    rig = GroupRig(spec, load(spec, weights, q8=True, threads=2), kv_type=kv_type)
    found, expected = rig.all_logits(tokens, cuts=[150, 152, 153]), reference(spec, weights, tokens)
    limit = {"f16": 0.03, "q8_0": 0.03, "q4_0": 0.12}[kv_type]
    assert rms(found, expected) < limit


@pytest.mark.parametrize("beside", [{"sinks": True}, {"softcap": 3.0}, {"sinks": True, "kv_from": 0}], ids=str)
def test_scores_of_shifted_keys(beside: dict[str, Any]) -> None:
    """Keys of q4_0 are shifted by what they have in common, which only a plain softmax does not see."""
    first, second = with_attention(qkv_bias=True, rotation=None, **beside).layers
    spec = replace(PLAIN, layers=(replace(first, attention=replace(second.attention, kv_from=None)), second))
    weights, tokens = random_weights(spec), random_tokens(spec.n_vocab, 100, seed=6)
    weights = {name: values * 4 if name[1] == "attn_k.bias" else values for name, values in weights.items()}
    rig = GroupRig(spec, load(spec, weights), kv_type="q4_0")
    assert rms(rig.all_logits(tokens, cuts=[90]), reference(spec, weights, tokens)) < 0.07


@pytest.mark.parametrize("name", MODELS)
def test_scores_and_hidden_states(name: str) -> None:
    """How likely a prompt's tokens are, by the same logits; the last token's hidden state is what they are made of."""
    spec = MODELS[name](33)
    weights, tokens = random_weights(spec), random_tokens(spec.n_vocab, 90, seed=7)
    loaded = load(spec, weights, threads=2)
    loaded.allocate(cells=6, block_size=16, type_k="f16", type_v="f16")
    targets, logprobs = np.array(tokens[1:], np.int32), np.empty(89)
    tops = np.empty((89, 1), np.int32), np.empty((89, 1))
    chunk, wants, hidden = [[90, 0, 1, 6, 0, 0]], [[89, 1]], np.zeros((1, spec.n_embd))
    logits = np.empty((1, spec.n_vocab), np.float32)
    assert loaded.read_prompts(
        np.array(tokens, np.int32), np.array(chunk, np.int32), np.arange(6, dtype=np.int32), logits,
        np.array(wants, np.int32), targets, logprobs, np.empty(89, np.int32), *tops, hidden,
    )  # fmt: skip
    expected = reference(spec, weights, tokens)
    totals = np.log(np.exp(expected).sum(-1))
    assert np.abs(logprobs - (expected[np.arange(89), targets] - totals[:89])).max() < 0.01
    made = hidden @ weights[-1, "output"].T.astype(np.float64) * spec.logit_scale
    capped = spec.logit_softcap * np.tanh(made / spec.logit_softcap) if spec.logit_softcap else made
    assert far(logits, expected[-1:]) < CLOSE
    assert rms(capped, expected[-1:]) < CLOSE


# --- bits ---


@cache
def engine(name: str, window: int, instruction_set: str, threads: int) -> tuple[ModelSpec, Engine]:
    spec = MODELS[name](window)
    return spec, load(spec, random_weights(spec), instruction_set=instruction_set, threads=threads, q8=True)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("window", some([5, 33, 300], 2))
def test_rows_depend_on_nothing_else(name: str, window: int, instruction_set: str, kv_type: str) -> None:
    """In one chunk, token by token, among others, on several threads, in groups and in one."""
    length = 2 * window + 40 if window < 100 else 570
    spec, alone = engine(name, window, instruction_set, 1)
    tokens, other = random_tokens(spec.n_vocab, length, seed=4), random_tokens(spec.n_vocab, 61, seed=5)
    expected = GroupRig(spec, alone, kv_type=kv_type, grouped=False).run(tokens, wants=12)
    first = length - 12
    for threads in (1, 3):
        rig = GroupRig(spec, engine(name, window, instruction_set, threads)[1], kv_type=kv_type, seed=threads)
        assert_same(rig.run(tokens, wants=12), expected, "in one chunk:")
        assert_same(rig.run(tokens, cuts=[first], wants=12), expected, "as drafts:")
        assert_same(rig.run(tokens, cuts=range(1, first, 13), wants=12)[-1:], expected[-1:], "in chunks:")
        tables, beside = rig.tables(length), rig.tables(61)
        rig.step((tokens[: first - 3], 0, tables, 0), (other[:50], 0, beside, 0))
        rig.step((tokens[first - 3 : first], first - 3, tables, 0))
        for at in range(12):
            begin = first + at
            mine = (tokens[begin : begin + 1], begin, tables, 1)
            rows = rig.step(mine, (other[at : at + 1], 40 + at % 10, beside, 1)) if at % 3 else rig.step(mine)
            assert_same(rows[:1], expected[at : at + 1], f"token {at} by itself:")


@quick
@given(data=st.data())
def test_chunks_of_any_size(data: st.DataObject) -> None:
    name, window = (
        data.draw(st.sampled_from(list(MODELS)), "model"),
        data.draw(st.sampled_from([1, 16, 17, 40]), "window"),
    )
    kv_type, length = data.draw(st.sampled_from(KV_TYPES), "type"), data.draw(st.integers(1, 150), "length")
    cuts = data.draw(st.lists(st.integers(1, 150), max_size=8), "cuts")
    spec, alone = engine(name, window, "auto", 1)
    tokens = random_tokens(spec.n_vocab, length, seed=length)
    expected = GroupRig(spec, alone, kv_type=kv_type, grouped=False).run(tokens)
    several = GroupRig(spec, engine(name, window, "auto", 2)[1], kv_type=kv_type, seed=length)
    assert_same(several.run(tokens, cuts)[-1:], expected)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize(
    "feature",
    ["sinks", "softcap", "temperature", "norm of turned heads", "norm of all heads, biases", "no rotation",
     "keys of an earlier layer", "inputs of layers, scaled"],
)  # fmt: skip
def test_dropped_tokens(feature: str, kv_type: str) -> None:
    """A rolling window, in one chunk and token by token."""
    spec = FEATURES[feature]
    tokens, rows = random_tokens(spec.n_vocab, 60, seed=8), []
    table = np.array([3, 0, 2, 1], np.int32)
    for cuts in ([40, 60], [40, *range(41, 61)], [40, 47, 60]):
        loaded = load(spec, random_weights(spec), threads=len(cuts))
        loaded.allocate(cells=4, block_size=16, type_k=kv_type, type_v=kv_type)
        found = np.empty((60, spec.n_vocab), np.float32)
        for begin, end in pairwise([0, *cuts]):
            chunk = [[end - begin, begin, end - begin, 4, 4096 if begin else 0, 16 if begin else 0]]
            ids = np.array(tokens[begin:end], np.int32)
            assert loaded.step(ids, np.array(chunk, np.int32), table, found[begin:end])
        rows.append(found)
    assert_same(rows[1], rows[0], "token by token:")
    assert_same(rows[2], rows[0], "in pieces:")


# --- the layout ---


@pytest.mark.parametrize(
    ("groups", "cell_bytes", "why"),
    [
        ([([0], 1)], 1 << 16, "layer 1 is in no group"),
        ([([0, 1], 1), ([1], 1)], 1 << 16, "in two groups"),
        ([([0, 2], 1)], 1 << 16, "layer 2"),
        ([([0, -1], 1)], 1 << 16, "layer -1"),
        ([([0, 1], 0)], 1 << 16, "0 cells"),
        ([([0, 1], 1)], 4096, "does not fit"),
        ([([0, 1], 2)], 2048, "does not fit"),
        ([([0, 1], 1)], 0, "cell_bytes"),
        ([([0, 1], 1)], 8200, "cell_bytes"),
        ([], -32, "cell_bytes"),
    ],
)  # fmt: skip
def test_impossible_layouts_are_refused(groups: list[tuple[list[int], int]], cell_bytes: int, why: str) -> None:
    sealed = load(PLAIN, random_weights(PLAIN))
    with pytest.raises(ValueError, match=why):
        sealed.allocate(
            cells=4, block_size=16, type_k="f16", type_v="f16", cell_bytes=cell_bytes, groups=groups
        )  # fmt: skip


def test_tokens_cannot_be_dropped_beside_a_window() -> None:
    spec = FEATURES["window"]
    sealed = load(spec, random_weights(spec))
    sealed.allocate(cells=4, block_size=16, type_k="f16", type_v="f16")
    chunk = np.array([[1, 20, 1, 2, 16, 16]], np.int32)
    with pytest.raises(ValueError, match="window"):
        sealed.step(np.array([1], np.int32), chunk, np.array([0, 1], np.int32), np.empty((1, spec.n_vocab), np.float32))


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_a_spec_is_needed(name: str) -> None:
    spec = MODELS[name](16)
    weights = random_weights(spec)
    for missing in weights:
        rest = {key: values for key, values in weights.items() if key != missing}
        if missing[1].endswith(".bias") or missing == (-1, "output"):
            continue
        with pytest.raises(ValueError, match=f"{missing[1]}.* missing"):
            load(spec, rest)
