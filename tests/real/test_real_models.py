"""Models with real weights (`make test-real`): as near to exact arithmetic as llama.cpp, and equal bits however the
text is cached."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm import LLM, SamplingParams
from cllm.models.gguf import GGUFModel
from cllm_bench.quality.llama import LlamaReference
from llm_kit import bits, engine_of
from plain_model import PlainModel
from repository import ROOT
from step_kit import Rig

DIRECTORY = Path(os.environ.get("REAL_MODELS", ""))
GEMMA, QWEN, TINYLLAMA = (
    DIRECTORY / f"{name}.gguf"
    for name in ("gemma-3-270m-q4_k_m", "qwen2.5-coder-1.5b-instruct-q4_k_m", "tinyllama-1.1b-chat-iq2")
)
MODELS = [GEMMA, QWEN, TINYLLAMA]
pytestmark = pytest.mark.skipif("REAL_MODELS" not in os.environ, reason="`make test-real` fetches the models")
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SETTINGS: dict[str, Any] = {
    "resources.kv_cache_max_memory_mb": 1500,
    "kv.disk.enabled": False,
}
EXACT = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


def tokens_of(path: Path, count: int) -> list[int]:
    with LLM(str(path), settings=SETTINGS | {"backend.type": "native"}) as llm:
        return llm._llm.text.tokenizer.encode(TEXT)[:count]


@pytest.mark.parametrize("path", [GEMMA, TINYLLAMA], ids=lambda path: path.stem)
def test_as_near_to_exact_arithmetic_as_llama_cpp(path: Path) -> None:
    """Mean KL divergence from float32, over the last tokens of a text that is longer than Gemma's window of 512."""
    tokens = tokens_of(path, 640)
    exact = log_softmax(PlainModel(GGUFModel.open(path)).logits(tokens)[-128:])
    rig = Rig(path, threads=os.cpu_count() or 1)
    ours = rig.all_logits(tokens, rig.table(len(tokens)), together=128)[-128:]
    with LlamaReference(path, context=1024, threads=os.cpu_count() or 1) as llama:
        theirs = llama.logits(tokens)[-128:]
    native, llama_cpp = (float(divergence(exact, log_softmax(rows)).mean()) for rows in (ours, theirs))
    print(f"{path.stem}: KL from float32, native {native:.5f}, llama.cpp {llama_cpp:.5f}")
    assert native <= 1.3 * llama_cpp


def log_softmax(rows: Any) -> Any:
    shifted = np.asarray(rows, np.float64) - rows.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def divergence(exact: Any, other: Any) -> Any:
    return (np.exp(exact) * (exact - other)).sum(axis=1)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_equal_bits_however_it_is_cached(path: Path) -> None:
    """A text of up to 6,000 tokens, then its next turn, an edit, and a shared beginning; alone, together and again."""
    tokens = tokens_of(path, min(6000, GGUFModel.open(path).spec.context_length - 100))
    half, most = len(tokens) // 2, len(tokens) * 2 // 3
    texts = [tokens, [*tokens, *tokens[:40]], [*tokens[:half], 7, 8, 9, *tokens[half + 3 : most]], tokens[: half - 300]]
    with LLM(str(path), settings=SETTINGS | {"backend.type": "native", "kv.free_behind_windows": False}) as llm:
        expected = [bits(llm.generate([text], EXACT)[0]) for text in texts]
    with LLM(str(path), settings=SETTINGS | {"backend.type": "native"}) as llm:
        for _ in range(2):
            assert [bits(llm.generate([text], EXACT)[0]) for text in texts] == expected
        answers = llm.generate(texts, EXACT, progress=False)
        assert [bits(answer) for answer in answers] == expected
        assert all(answer.cached_tokens > 0 for answer in answers)
        engine_of(llm).scheduler.kv.check()
