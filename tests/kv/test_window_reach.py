"""How far back layers with a window must be computed again where full layers' K and V are cached, in a small model that
is written out: the bits are those of computing everything, and others from one token later on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cllm.models.spec import AttentionSpec, LayerSpec, ModelSpec

SIZE = 4
Vectors = NDArray[np.float64]


class SmallModel:
    """Layers that attend, with windows or (0) to everything; `shares` is the layer whose K and V a layer uses."""

    def __init__(self, windows: Sequence[int], shares: Sequence[int]) -> None:
        random = np.random.default_rng(3)
        self.windows, self.shares = windows, shares
        self.weights = 0.5 * random.normal(size=(len(windows), 4, SIZE, SIZE))

    def compute(self, inputs: Vectors, start: int, cached: list[Vectors], known: int) -> Vectors:
        """The outputs from `start` on. `cached`: K and V of each layer, of which those before `known` are there in
        layers without a window; the others are there from `start` on, when they are computed."""
        outputs = np.full_like(inputs, np.nan)
        states = inputs.copy()
        for layer, window in enumerate(self.windows):
            query, key, value, mix = self.weights[layer]
            if self.shares[layer] == layer:
                for at in range(start if window else max(start, known), len(inputs)):
                    cached[layer][at] = [states[at] @ key, states[at] @ value]
            keys = cached[self.shares[layer]]
            for at in range(start, len(inputs)):
                first = max(start, at - window + 1) if window else 0
                scores = np.array([states[at] @ query @ each[0] for each in keys[first : at + 1]])
                parts = np.exp(scores - scores.max())
                mixed = sum(
                    part * each[1] for part, each in zip(parts / parts.sum(), keys[first : at + 1], strict=True)
                )
                outputs[at] = np.tanh(states[at] + mixed @ mix)
            states = outputs.copy()
        return outputs


def rebuilt(model: SmallModel, inputs: Vectors, start: int, known: int) -> tuple[Vectors, Vectors]:
    """The outputs of all positions computed from the first on, and from `start` on."""

    def empty() -> list[Vectors]:
        return [np.full((len(inputs), 2, SIZE), np.nan) for _ in model.windows]

    cached, again = empty(), empty()
    whole = model.compute(inputs, 0, cached, 0)
    for layer, window in enumerate(model.windows):
        if not window:
            again[layer][:known] = cached[layer][:known]
    return whole, model.compute(inputs, start, again, known)


def reach_of(windows: Sequence[int]) -> int:
    spec = ModelSpec("fake", 8, 10, 99, tuple(LayerSpec(AttentionSpec(1, 1, 2, 2, window=each)) for each in windows))
    group = spec.kv_layout("f16", "f16", 16, apart=True).local
    assert group is not None
    return group.reach


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([0, 0, 2, 3, 5]), min_size=2, max_size=6), st.integers(0, 6))
def test_every_position_behind_the_reach_has_the_same_bits(windows: list[int], more: int) -> None:
    if not any(windows) or all(windows):
        windows = [*windows, 0, 4]
    reach, last = reach_of(windows), max(window for window in windows if window)
    known = reach + last - 1 + more
    inputs = np.random.default_rng(len(windows)).normal(size=(known + 6, SIZE))
    whole, again = rebuilt(SmallModel(windows, range(len(windows))), inputs, more, known)
    assert (whole[known:] == again[known:]).all()


@pytest.mark.parametrize("windows", [[0, 4], [4, 0], [3, 3, 0], [5, 0, 5, 5, 0], [2, 0, 2]])
def test_from_one_token_later_on_they_are_others(windows: list[int]) -> None:
    reach, last = reach_of(windows), max(windows)
    known = reach + last + 3
    inputs = np.random.default_rng(1).normal(size=(known + 6, SIZE))
    model = SmallModel(windows, range(len(windows)))
    for start, same in ((known - reach - last + 1, True), (known - reach - last + 2, False)):
        whole, again = rebuilt(model, inputs, start, known)
        assert bool((whole[known:] == again[known:]).all()) is same


def test_layers_that_use_the_keys_of_others_reach_no_farther() -> None:
    windows, shares = [3, 0, 3, 0, 3, 3], [0, 1, 2, 3, 2, 2]
    reach = reach_of(windows[:4])
    known = reach + 3 - 1 + 2
    inputs = np.random.default_rng(1).normal(size=(known + 6, SIZE))
    whole, again = rebuilt(SmallModel(windows, shares), inputs, 2, known)
    assert (whole[known:] == again[known:]).all()
