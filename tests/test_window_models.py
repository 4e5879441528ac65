"""Rolling windows of the real model: to the bit on native, and beyond the context on llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cllm import LLM, ContextWindow, SamplingParams
from test_native_llm import LONG, PROMPTS, assert_idle, bits, empty_cache, engine_of

pytestmark = pytest.mark.model

SETTINGS: dict[str, Any] = {"resources.max_context_length": 256}
WINDOW = ContextWindow(recent=128, keep=16)
PARAMS = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True, logprobs=2, context_window=WINDOW)


@pytest.fixture(scope="module")
def alone() -> list[list[Any]]:
    """Each prompt's answer when nothing else runs and nothing is cached; the first is longer than the context."""
    with LLM("smollm2", backend="native", settings=SETTINGS) as fresh:
        answers = []
        for prompt in (LONG, *PROMPTS[:3]):
            (answer,) = fresh.generate(prompt, PARAMS)
            assert len(answer.token_ids) == 180
            answers.append(bits(answer))
            empty_cache(fresh)
        return answers


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="together"),
        pytest.param({"scheduler.max_step_tokens": 37}, id="in small chunks"),
        pytest.param({"resources.kv_cache_max_memory_mb": 8}, id="preempted"),
        pytest.param({"backend.threads": 1}, id="on one thread"),
        pytest.param({"kv.compaction": "always"}, id="while blocks are moved"),
    ],
)
def test_the_same_bits(settings: dict[str, Any], alone: list[list[Any]]) -> None:
    with LLM("smollm2", backend="native", settings=SETTINGS | settings) as llm:
        prompts = [LONG, *PROMPTS[:3]]
        for _ in range(2):  # the second time with what the first one left in the cache
            assert [bits(answer) for answer in llm.generate(prompts, PARAMS, progress=False)] == alone
        assert_idle(llm)
        assert (engine_of(llm).scheduler.preemptions > 0) == ("resources.kv_cache_max_memory_mb" in settings)


@pytest.fixture(scope="module")
def llama() -> Iterator[LLM]:
    pytest.importorskip("llama_cpp")
    settings = SETTINGS | {"backend.llama_cpp.n_seq_max": 2, "resources.kv_cache_max_memory_mb": 40}
    with LLM("smollm2", backend="llama_cpp", settings=settings) as opened:
        yield opened


def test_llama_cpp_goes_on_beyond_its_context(llama: LLM, alone: list[list[Any]]) -> None:
    answers = llama.generate([LONG, *PROMPTS[:3]], PARAMS, progress=False)
    assert [(answer.finish_reason, len(answer.token_ids)) for answer in answers] == [("length", 180)] * 4
    scheduler = engine_of(llama).scheduler
    assert scheduler.kv.dropped_tokens > 4 * 32
    assert scheduler.position_mismatches == 0 and engine_of(llama).rebuilds == 0
    assert_idle(llama)
    # Keys that llama.cpp rotates again and keys that stay as they are mean the same: what follows a prompt longer than
    # the context is as likely on both, up to rounding.
    (ours, *_), theirs = alone[0], bits(answers[0])[0]
    assert ours[0] == theirs[0] and abs(ours[1] - theirs[1]) < 0.1, (ours, theirs)
