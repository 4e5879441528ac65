"""On every architecture of GGUF files the native engine is as near to exact arithmetic as llama.cpp is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from architecture_kit import TINY, write_tiny
from cllm.backends.native.loader import load_engine, unsupported
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_decoder import decoder_spec
from cllm_bench.quality.llama import LlamaReference
from plain_model import Floats, PlainModel
from recurrence_kit import StateRig
from thorough import slow

pytestmark = slow

LENGTH = 80
SLACK = 1.3
"""Rounding is chance."""


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", [name for name in TINY if name != "phi3, windows"])  # llama.cpp ignores those
def test_as_near_as_llama_cpp(name: str, kind: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", TINY[name], GGMLQuantizationType[kind])
    model = GGUFModel.open(path)
    if (reason := unsupported(model)) is not None:
        pytest.skip(reason)
    tokens = np.random.default_rng(1).integers(0, 97, LENGTH).tolist()
    exact = PlainModel(model).logits(tokens)
    rig = StateRig(decoder_spec(model), load_engine(model, threads=1))
    ours = distance(rig.run(tokens, cuts=(33, 66)), exact)
    with LlamaReference(path, context=256, threads=1) as llama:
        theirs = distance(llama.logits(tokens), exact)
    print(f"{name}, {kind}: native {ours:.5f}, llama.cpp {theirs:.5f}")
    assert ours <= SLACK * theirs


def distance(found: Floats, exact: Floats) -> float:
    """RMS of the differences, in standard deviations."""
    return float(np.sqrt(np.mean(np.square(found - exact))) / exact.std())
