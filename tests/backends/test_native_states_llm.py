"""Models whose layers carry a state, on the native engine under the whole of cLLM: an answer's bits do not depend on
what is cached, what else runs, or whether it was preempted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from architecture_kit import TINY, write_tiny
from cllm import LLM, SamplingParams
from cllm.errors import BackendError
from llm_kit import assert_idle, bits, empty_cache, engine_of
from native_kit import vocabulary_keys

VOCABULARY = 320
ARCHITECTURES = ("qwen35", "lfm2", "granitehybrid", "nemotron_h", "falcon-h1", "mamba2")
SETTINGS: dict[str, Any] = {"resources.max_context_length": 512, "resources.kv_cache_max_memory_mb": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, VOCABULARY) for _ in range(count)]


PROMPTS = [tokens(count, count) for count in (1, 5, 16, 40, 100, 200)]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = TINY[request.param]
    tiny = replace(tiny, keys={**tiny.keys, "vocab_size": VOCABULARY, "context_length": 512})
    folder = tmp_path_factory.mktemp("model")
    return write_tiny(folder / "tiny.gguf", tiny, vocabulary=vocabulary_keys(VOCABULARY))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), backend="native", settings=SETTINGS) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(path: Path) -> list[list[Any]]:
    """Each prompt's answer when nothing else runs and nothing is cached."""
    answers = []
    with LLM(str(path), backend="native", settings=SETTINGS | {"backend.threads": 1}) as fresh:
        for prompt in PROMPTS:
            (answer,) = fresh.generate([prompt], GREEDY, progress=False)
            answers.append(bits(answer))
    return answers


def test_it_says_what_it_cannot_do(llm: LLM) -> None:
    traits = engine_of(llm).backend.traits
    assert traits.name == "native" and traits.most_drafts == 0
    assert traits.no_window is not None and "state" in traits.no_window


def test_together_equals_alone(llm: LLM, alone: list[list[Any]]) -> None:
    assert [bits(answer) for answer in llm.generate(PROMPTS, GREEDY, progress=False)] == alone
    assert_idle(llm)


def test_cached_equals_uncached(llm: LLM, alone: list[list[Any]]) -> None:
    llm.generate(PROMPTS, GREEDY, progress=False)
    cached = 0
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        (answer,) = llm.generate([prompt], GREEDY, progress=False)
        assert bits(answer) == expected
        cached += answer.cached_tokens
    assert cached > 200


def test_the_next_turn_goes_on_where_the_last_one_ended(llm: LLM) -> None:
    empty_cache(llm)
    (first,) = llm.generate([PROMPTS[5]], GREEDY, progress=False)
    turn = [*PROMPTS[5], *(entry[0] for entry in bits(first)), *tokens(30, 1)]
    (warm,) = llm.generate([turn], GREEDY, progress=False)
    assert warm.cached_tokens >= 192
    empty_cache(llm)
    (cold,) = llm.generate([turn], GREEDY, progress=False)
    assert bits(warm) == bits(cold)


def test_a_prefix_of_someone_else_changes_nothing(llm: LLM, alone: list[list[Any]]) -> None:
    for cut in (17, 160, 199):
        llm.generate([[*PROMPTS[5][:cut], 5, 6, 7]], GREEDY, progress=False)
        (answer,) = llm.generate([PROMPTS[5]], GREEDY, progress=False)
        assert bits(answer) == alone[5]


def test_answers_that_share_a_prompt_equal_those_that_do_not(llm: LLM) -> None:
    def params(seed: int, n: int = 1) -> SamplingParams:
        return SamplingParams(temperature=0.9, seed=seed, n=n, max_tokens=20, ignore_eos=True, logprobs=2)

    together = llm.generate([PROMPTS[4]], params(seed=11, n=4), progress=False)
    empty_cache(llm)
    apart = [llm.generate([PROMPTS[4]], params(seed=11 + index), progress=False)[0] for index in range(4)]
    assert [bits(answer) for answer in together] == [bits(answer) for answer in apart]
    assert len({tuple(answer.token_ids) for answer in together}) > 1
    assert_idle(llm)


def test_a_lost_context_is_rebuilt_and_nothing_shows(llm: LLM, alone: list[list[Any]]) -> None:
    backend, steps = engine_of(llm).backend, 0
    original = backend.collect

    def lose(ticket: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise BackendError("the arena is gone", fatal=True)
        return original(ticket)

    before = engine_of(llm).snapshot.rebuilds
    backend.collect = lose  # type: ignore[method-assign]
    try:
        answers = llm.generate(PROMPTS, GREEDY, progress=False)
    finally:
        backend.collect = original  # type: ignore[method-assign]
    assert [bits(answer) for answer in answers] == alone
    assert engine_of(llm).snapshot.rebuilds == before + 1
    assert_idle(llm)


def test_preempted_equals_undisturbed(path: Path, llm: LLM) -> None:
    prompts = [tokens(60, seed) for seed in range(8)]
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, logprobs=1)
    expected = [bits(answer) for answer in llm.generate(prompts, params, progress=False)]
    layout = engine_of(llm).backend.spec.kv_layout("f16", "f16", 16, apart=True)
    assert layout.states is not None
    most = 8 * (-(-210 // 16) + 2 * layout.states.cells) * layout.cell_bytes
    tight = {"resources.kv_cache_max_memory_mb": 0.7 * most / 2**20, "resources.max_context_length": 256}
    with LLM(str(path), backend="native", settings=SETTINGS | tight | {"scheduler.watermark": 0.0}) as narrow:
        assert [bits(answer) for answer in narrow.generate(prompts, params, progress=False)] == expected
        assert engine_of(narrow).snapshot.preemptions > 0
        assert_idle(narrow)


@pytest.mark.usefixtures("loading_pays")
def test_a_restart_loses_nothing(path: Path, alone: list[list[Any]], tmp_path: Path) -> None:
    """States come back from disk with the K/V that they belong to."""
    disk = SETTINGS | {"kv.disk.enabled": True, "kv.disk.directory": str(tmp_path), "kv.disk.max_mb": 64}
    with LLM(str(path), backend="native", settings=disk) as llm:
        for _ in range(2):  # what is short is written once it was used again
            assert bits(llm.generate([PROMPTS[5]], GREEDY, progress=False)[0]) == alone[5]
    with LLM(str(path), backend="native", settings=disk) as llm:
        (answer,) = llm.generate([PROMPTS[5]], GREEDY, progress=False)
        assert answer.cached_tokens >= 192 and llm.kv()["disk"]["failed_loads"] == 0
        assert bits(answer) == alone[5]
