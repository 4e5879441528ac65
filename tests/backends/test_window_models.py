"""Rolling windows of the real model: to the bit on native, and beyond the context on llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm import LLM, ContextWindow, SamplingParams
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.text.tokenizer import load_tokenizer
from cllm_bench.quality.texts import TEXT
from llm_kit import LONG, PROMPTS, assert_idle, bits, empty_cache, engine_of
from step_kit import Part, Rig
from thorough import exhaustive, slow, some

pytestmark = [slow, pytest.mark.model]

SETTINGS: dict[str, Any] = {"resources.max_context_length": 256}
WINDOW = ContextWindow(recent=128, keep=16)
PARAMS = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True, logprobs=2, context_window=WINDOW)


@pytest.fixture(scope="module")
def alone() -> list[list[Any]]:
    """Each prompt's answer when nothing else runs and nothing is cached; the first is longer than the context."""
    with LLM("smollm2", backend="native", settings=SETTINGS) as fresh:
        answers = []
        for prompt in (LONG, *PROMPTS[:1]):
            (answer,) = fresh.generate(prompt, PARAMS)
            assert len(answer.token_ids) == 180
            answers.append(bits(answer))
            empty_cache(fresh)
        return answers


@exhaustive
@pytest.mark.parametrize(
    "settings",
    some(
        [
            pytest.param({}, id="together"),
            pytest.param({"scheduler.max_step_tokens": 37}, id="in small chunks"),
            pytest.param({"resources.kv_cache_max_memory_mb": 6}, id="preempted"),
            pytest.param({"backend.threads": 1}, id="on one thread"),
            pytest.param({"kv.compaction": "always"}, id="while blocks are moved"),
        ],
        2,
    ),
)
def test_the_same_bits(settings: dict[str, Any], alone: list[list[Any]]) -> None:
    with LLM("smollm2", backend="native", settings=SETTINGS | settings) as llm:
        prompts = [LONG, *PROMPTS[:1]]
        for _ in range(2):  # the second time with what the first one left in the cache
            assert [bits(answer) for answer in llm.generate(prompts, PARAMS, progress=False)] == alone
        assert_idle(llm)
        assert (engine_of(llm).scheduler.requests.preemptions > 0) == ("resources.kv_cache_max_memory_mb" in settings)


def test_rounded_keys_look_at_sinks_and_others_alike() -> None:
    """Before they are rounded to four bits, keys are moved by what all of a head's have in common. That adds one number
    to all scores of a query, which does not matter; but sinks are looked at with another query, for which it is another
    number. Were that forgotten, the divergence from f16 would be 27 times that of q8_0."""
    path = resolve("smollm2")
    tokens = load_tokenizer(GGUFModel.open(path)).encode(TEXT.read_text("utf-8"))[:240]
    rig = Rig(path, blocks=16)
    found = {kind: _log_probabilities(rig, tokens, kind) for kind in ("f16", "q8_0", "q4_0")}
    exact = found["f16"]
    divergence = {kind: float((np.exp(exact) * (exact - rows)).sum(1).mean()) for kind, rows in found.items()}
    assert divergence["q4_0"] < 14 * divergence["q8_0"]


def _log_probabilities(rig: Rig, tokens: list[int], type_k: str) -> NDArray[np.float64]:
    """Of the last tokens, if thousands of others were dropped behind the first ones."""
    rig.allocate(blocks=rig.blocks, type_k=type_k)
    table, many, last = list(range(rig.blocks)), 5000, len(tokens) - 60
    rig.step(Part(tokens[:16], 0, table, wants=False))
    rig.step(Part(tokens[16:last], 16, table, wants=False, dropped=many, kept=16))
    steps = (Part([tokens[at]], at, table, dropped=many, kept=16) for at in range(last, len(tokens)))
    rows = [rig.step(step)[0].astype(np.float64) for step in steps]
    return np.array([row - np.logaddexp.reduce(row) for row in rows])


@pytest.fixture(scope="module")
def llama() -> Iterator[LLM]:
    settings = SETTINGS | {"backend.llama_cpp.n_seq_max": 2, "resources.kv_cache_max_memory_mb": 40}
    with LLM("smollm2", backend="llama_cpp", settings=settings) as opened:
        yield opened


def test_llama_cpp_goes_on_beyond_its_context(llama: LLM, alone: list[list[Any]]) -> None:
    answers = llama.generate([LONG, *PROMPTS[:1]], PARAMS, progress=False)
    assert [(answer.finish_reason, len(answer.token_ids)) for answer in answers] == [("length", 180)] * 2
    scheduler = engine_of(llama).scheduler
    assert scheduler.kv.dropped_tokens > 2 * 32
    assert scheduler.faults.position_mismatches == 0 and engine_of(llama).rebuilds == 0
    assert_idle(llama)
    # Keys that llama.cpp rotates again and keys that stay as they are mean the same: what follows a prompt longer than
    # the context is as likely on both, up to rounding.
    (ours, *_), theirs = alone[0], bits(answers[0])[0]
    assert ours[0] == theirs[0] and abs(ours[1] - theirs[1]) < 0.1, (ours, theirs)
