"""Every architecture of GGUF files that we read: what a file says gives the logits that llama.cpp gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from architecture_kit import TINY, write_tiny
from cllm.models.gguf import GGUFModel
from cllm_bench.quality.llama import LlamaReference
from plain_model import PlainModel

LENGTH = 80
"""Tokens: more than the windows, and than the context before it was made longer."""


@pytest.mark.parametrize("name", TINY)
def test_the_logits_of_llama_cpp(name: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", TINY[name])
    tokens = np.random.default_rng(1).integers(0, 97, LENGTH).tolist()
    found = PlainModel(GGUFModel.open(path)).logits(tokens)
    with LlamaReference(path, context=256, threads=1, kv_type="f32") as llama:
        expected = llama.logits(tokens)
    distance = np.sqrt(np.mean(np.square(found - expected))) / expected.std()
    print(name, distance, expected.std())
    assert distance < 1e-3
