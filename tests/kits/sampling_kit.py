"""What chooses tokens from rows (numpy, and the extension in each instruction set), the slow and obvious reference that
they are compared with, and rows to compare them on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import numpy_sampler
from cllm._native import RowSampler, instruction_sets
from cllm.engine import sampling

NATIVE = instruction_sets()
NUMPY = cast(RowSampler, numpy_sampler)
SAMPLERS = ["numpy", *NATIVE]


def packed(allowed: Sequence[bool]) -> NDArray[np.int32]:
    """A mask of these truth values, as the engine has them."""
    words = np.zeros((len(allowed) + 31) // 32 * 4, np.uint8)
    bits = np.packbits(np.array(allowed, np.bool_), bitorder="little")
    words[: len(bits)] = bits
    return words.view(np.int32)


def sampler(name: str) -> RowSampler:
    return NUMPY if name == "numpy" else RowSampler(name)


@contextmanager
def choosing_with(rows: RowSampler) -> Iterator[None]:
    """What is made to choose tokens meanwhile works with this implementation."""
    with mock.patch.object(sampling, "DEFAULT_SAMPLER", rows):
        yield


def reference_draw(
    values: Sequence[float], u: float, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """The tokens whose share of the CDF holds u: one, or several if u is within a millionth of their borders."""
    order = sorted((i for i, value in enumerate(values) if value > -math.inf), key=lambda i: (-values[i], i))
    peak = values[order[0]]
    weights = {token: math.exp((values[token] - peak) / temperature) for token in order}
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        mass = top_p * sum(weights[token] for token in order)
        running = itertools.accumulate(weights[token] for token in order)
        size = next((i + 1 for i, total in enumerate(running) if total >= mass), len(order))
        order = order[:size]
    kept = sorted(token for token in order if weights[token] >= min_p and weights[token] > 0.0)
    ends = list(itertools.accumulate(weights[token] for token in kept))
    low, high = (u - 1e-6) * ends[-1], (u + 1e-6) * ends[-1]
    starts = [0.0, *ends[:-1]]
    return {token for token, start, end in zip(kept, starts, ends, strict=True) if start <= high and end >= low}


def reference_answers(values: Sequence[float], u: float, truncation: Mapping[str, Any]) -> set[int]:
    """The answers for every top_p and min_p within a millionth: more than one only right on a border."""
    near = (1.0, 1.0 - 1e-6, 1.0 + 1e-6)
    answers = set()
    for by_p, by_m in itertools.product(near, near):
        top_p = truncation["top_p"] * by_p if truncation["top_p"] < 1.0 else 1.0
        min_p = min(truncation["min_p"] * by_m, 1.0)
        answers |= reference_draw(values, u, **{**truncation, "top_p": top_p, "min_p": min_p})
    return answers


TEMPERATURES = st.sampled_from([1e-6, 0.1, 0.7, 1.0, 1.5, 5.0])
TRUNCATIONS = st.fixed_dictionaries(
    {
        "temperature": TEMPERATURES,
        "top_k": st.sampled_from([0, -1, 1, 2, 5, 40, 300, 700, 1100, 1500, 10**9]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    }
)


@st.composite
def long_rows(draw: st.DrawFn, sizes: Sequence[int]) -> NDArray[np.float32]:
    """Flat, peaked, full of ties, with holes: for nuclei from one token to thousands."""
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    size, spread = draw(st.sampled_from(sizes)), draw(st.sampled_from([0.0, 0.01, 0.5, 3.0]))
    values = random.normal(0.0, spread, size).astype(np.float32)
    values[random.integers(0, size, 40)] += np.float32(draw(st.sampled_from([0.0, 4.0, 12.0])))
    if draw(st.booleans()):
        values = np.round(values * np.float32(4)) / np.float32(4)
    values[random.random(size) < draw(st.sampled_from([0.0, 0.0, 0.9]))] = -np.inf
    values[random.integers(0, size)] = 0.5
    return values
