"""The native backend under the whole engine: an answer's bits do not depend on what else happens.

Log probabilities are compared with ==, so that a difference in the last digit of any logit shows.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cllm import LLM, AsyncLLM, SamplingParams
from cllm.backends.base import Chunk
from cllm.backends.llama_cpp import library
from cllm.config import load_config
from cllm.errors import BackendError, CLLMError, ConfigError, ModelError, RequestCancelledError
from cllm.loading.parts import ModelParts
from engine_kit import assert_nothing_left
from gguf_kit import with_keys
from llm_kit import LONG, PROMPTS, assert_idle, bits, empty_cache, engine_of
from loading_kit import load_parts
from native_kit import build_model, write_model
from states_kit import write_states_model

pytestmark = pytest.mark.model

SETTINGS: dict[str, Any] = {"resources.max_context_length": 1024, "resources.kv_cache_max_memory_mb": 200}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", backend="native", settings=SETTINGS) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone() -> list[list[Any]]:
    """Each prompt's answer when nothing else runs and nothing is cached: one token after another, in an empty cache."""
    with LLM("smollm2", backend="native", settings=SETTINGS) as fresh:
        answers = []
        for prompt in PROMPTS:
            (answer,) = fresh.generate(prompt, GREEDY)
            assert answer.cached_tokens == 0
            answers.append(bits(answer))
            empty_cache(fresh)
        return answers


# -- equal bits ----------------------------------------------------------------------------------------------------


def test_batched_equals_alone(llm: LLM, alone: list[list[Any]]) -> None:
    assert [bits(answer) for answer in llm.generate(PROMPTS, GREEDY, progress=False)] == alone
    assert_idle(llm)


def test_cached_equals_uncached(llm: LLM, alone: list[list[Any]]) -> None:
    llm.generate(PROMPTS, GREEDY, progress=False)
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        (answer,) = llm.generate(prompt, GREEDY)
        assert answer.cached_tokens == (answer.prompt_tokens - 1) // 16 * 16
        assert bits(answer) == expected


def test_a_prefix_of_someone_else_changes_nothing(llm: LLM) -> None:
    ids = llm._llm.text.tokenizer.encode(LONG)[:300]
    (expected,) = llm.generate([ids], GREEDY)
    for cut in (17, 160, 299):
        empty_cache(llm)
        llm.generate([[*ids[:cut], 5, 6, 7]], GREEDY)
        (answer,) = llm.generate([ids], GREEDY)
        assert answer.cached_tokens == cut // 16 * 16
        assert bits(answer) == bits(expected)


def test_beside_a_long_prompt_that_is_cut_into_chunks(llm: LLM, alone: list[list[Any]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
    (expected,) = llm.generate(LONG, params)
    empty_cache(llm)
    *short, long = llm.generate([*PROMPTS, LONG], GREEDY, progress=False)
    assert [bits(answer) for answer in short] == alone
    assert bits(long)[:4] == bits(expected)


def test_preempted_equals_undisturbed(alone: list[list[Any]]) -> None:
    # Room for 18 blocks: five of the prompts fit, their answers do not.
    tight = SETTINGS | {"resources.kv_cache_max_memory_mb": 18 * 16 * 23_040 / 2**20 + 0.01, "scheduler.watermark": 0.0}
    with LLM("smollm2", backend="native", settings=tight) as llm:
        answers = llm.generate(PROMPTS, GREEDY, progress=False)
        assert engine_of(llm).snapshot.preemptions > 0
        assert [bits(answer) for answer in answers] == alone
        assert_idle(llm)


def test_answers_that_share_a_prompt_equal_those_that_do_not(llm: LLM) -> None:
    def params(seed: int, n: int = 1) -> SamplingParams:
        return SamplingParams(temperature=0.9, seed=seed, n=n, max_tokens=24, ignore_eos=True, logprobs=2)

    before = engine_of(llm).snapshot.kv.moved_bytes
    together = llm.generate(PROMPTS[0], params(seed=11, n=5))
    assert engine_of(llm).snapshot.kv.moved_bytes > before  # the last, partly filled block was copied on write
    empty_cache(llm)
    apart = [llm.generate(PROMPTS[0], params(seed=11 + index))[0] for index in range(5)]
    assert [bits(answer) for answer in together] == [bits(answer) for answer in apart]
    assert len({answer.text for answer in together}) > 1
    assert_idle(llm)


# -- faults --------------------------------------------------------------------------------------------------------


class Sabotage:
    """Replaces a backend's step: `fault(number, chunks)` may raise before step `number` is computed."""

    def __init__(self, llm: LLM, fault: Any) -> None:
        self._backend = engine_of(llm).backend
        self._original = self._backend.collect
        self._fault = fault
        self._steps = 0

    def __enter__(self) -> None:
        self._backend.collect = self._step  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        self._backend.collect = self._original  # type: ignore[method-assign]

    def _step(self, chunks: Sequence[Chunk]) -> Any:
        self._steps += 1
        self._fault(self._steps, chunks)
        return self._original(chunks)


def test_a_lost_context_is_rebuilt_and_nothing_shows(llm: LLM, alone: list[list[Any]]) -> None:
    def lose(step: int, chunks: Sequence[Chunk]) -> None:
        if step == 4:  # with drafts there may be few more
            raise BackendError("the arena is gone", fatal=True)

    before = engine_of(llm).snapshot.rebuilds
    with Sabotage(llm, lose):
        answers = llm.generate(PROMPTS, GREEDY, progress=False)
    assert [bits(answer) for answer in answers] == alone
    assert engine_of(llm).snapshot.rebuilds == before + 1
    assert_idle(llm)


def test_a_failing_sequence_does_not_take_the_others_down(llm: LLM, alone: list[list[Any]]) -> None:
    victim = llm._llm.text.tokenizer.encode(PROMPTS[3])

    def fail(step: int, chunks: Sequence[Chunk]) -> None:
        if any(chunk.start > len(victim) and chunk.blocks[0] in blocks for chunk in chunks):
            raise BackendError("this one cannot be computed")
        for chunk in (chunk for chunk in chunks if chunk.start < len(victim)):  # it may come in any number of pieces
            if chunk.tokens.tolist() != victim[chunk.start : chunk.start + len(chunk.tokens)]:
                blocks.discard(chunk.blocks[0])
            elif chunk.start == 0:
                blocks.add(chunk.blocks[0])

    blocks: set[int] = set()
    empty_cache(llm)

    async def all_of_them() -> list[Any]:
        async def one(prompt: str) -> Any:
            async with llm._llm.submit(prompt, GREEDY) as generation:
                return [logprob async for delta in generation for logprob in delta.logprobs or ()]

        return await asyncio.gather(*map(one, PROMPTS), return_exceptions=True)

    with Sabotage(llm, fail):
        outcomes = llm._wait(all_of_them())
    assert isinstance(outcomes.pop(3), BackendError)
    expected = alone[:3] + alone[4:]
    assert [[(entry.token_id, entry.logprob, entry.top) for entry in outcome] for outcome in outcomes] == expected
    assert_idle(llm)


# -- coming and going ----------------------------------------------------------------------------------------------


async def until_ended(llm: AsyncLLM, requests: int) -> None:
    async def ended() -> None:
        while sum(llm.executor.snapshot().finished.values()) < requests or llm.executor.snapshot().kv.referenced:
            await asyncio.sleep(0.005)

    await asyncio.wait_for(ended(), 20)


def native_config(**settings: Any) -> Any:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    return load_config(None, {"backend.type": "native", **SETTINGS, **keys}).config


async def test_a_prompt_that_is_cancelled_while_it_is_computed_leaves_nothing() -> None:
    async with AsyncLLM(native_config()) as llm:
        started = asyncio.Event()
        loop = asyncio.get_running_loop()
        engine = llm.executor.engine
        assert engine is not None
        original = engine.backend.collect

        def step(chunks: Sequence[Chunk]) -> Any:
            loop.call_soon_threadsafe(started.set)
            return original(chunks)

        engine.backend.collect = step  # type: ignore[method-assign]
        generation = llm.submit(LONG, GREEDY)
        await started.wait()
        await generation.aclose()
        with pytest.raises(RequestCancelledError):
            await anext(aiter(generation))
        await until_ended(llm, 1)
        assert llm.executor.snapshot().finished == {"cancelled": 1} and llm.executor.snapshot().generated_tokens == 0
        assert_nothing_left(engine)


async def test_twenty_clients_that_come_and_go() -> None:
    rng = random.Random(5)
    outcomes: list[str] = []
    async with AsyncLLM(native_config(scheduler__max_running=6)) as llm:

        async def visit(number: int) -> None:
            prompt = LONG[: rng.choice([0, 300, 1500])] + f"Visitor {number}: hello."
            await asyncio.sleep(rng.random() * 0.3)
            async with llm.submit(prompt, SamplingParams(max_tokens=rng.randint(1, 40), seed=number)) as generation:
                patience = rng.choice([1, 3, 1000])
                async for _ in generation:
                    patience -= 1
                    if patience == 0:
                        outcomes.append("left")
                        return
                outcomes.append("answered")

        await asyncio.gather(*(visit(number) for number in range(20)))
        await until_ended(llm, 20)
        assert len(outcomes) == 20 and set(outcomes) == {"left", "answered"}
        assert llm.executor.engine is not None
        assert_nothing_left(llm.executor.engine)


# -- which backend runs --------------------------------------------------------------------------------------------


def parts_of(backend: str, model: str = "smollm2", **settings: Any) -> ModelParts:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    return load_parts(load_config(None, {"backend.type": backend, "model.name": model, **SETTINGS, **keys}).config)


def assembled(backend: str, model: str = "smollm2", **settings: Any) -> str:
    with parts_of(backend, model, **settings).backend as opened:
        return opened.traits.name


@pytest.fixture
def foreign(tmp_path: Path) -> str:
    """A model that llama.cpp runs and the native engine does not."""
    model = build_model(rope_scaling="yarn").with_metadata(rope__scaling__yarn_ext_factor=0.5)
    return str(model.write(tmp_path / "foreign.gguf"))


def test_auto_is_native_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cllm"):
        assert assembled("auto") == "native"
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("native (")]
    assert line.endswith(": up to 256 sequences at once")
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("context: ")]
    assert line.startswith("context: 1,024 tokens (resources.max_context_length;") and "23,040 bytes" in line, line
    assert "KV cache: 200 MiB (resources.kv_cache_max_memory_mb)" in caplog.messages
    assert "using llama_cpp" not in caplog.text


def test_auto_falls_back_to_llama_cpp_and_says_why(foreign: str, caplog: pytest.LogCaptureFixture) -> None:
    assert assembled("auto", foreign) == "llama_cpp"
    (line,) = [record.getMessage() for record in caplog.records if "using llama_cpp" in record.getMessage()]
    assert line.startswith("native cannot run foreign.gguf: ") and "yarn" in line.lower() and "\n" not in line


def test_layers_that_predict_further_tokens_get_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sound = write_states_model(tmp_path / "sound.gguf", "qwen35", lacks="scale$|^cls")
    path = with_keys(sound, tmp_path / "further.gguf", {"qwen35.nextn_predict_layers": 1})
    with caplog.at_level(logging.INFO, "cllm"):
        assert assembled("auto", str(path)) == "native"
    said = [message for message in caplog.messages if "MTP" in message]
    assert said == ["further: its 1 layer that predicts further tokens (MTP) is not used"]


def test_what_auto_falls_back_to_has_relations_too(foreign: str) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.max_running is 20 but backend\.llama_cpp\.n_seq_max is 8"):
        assembled("auto", foreign, scheduler__max_running=20)


def test_with_neither_backend_both_reasons_are_given(foreign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load_library", library.load_library.__wrapped__)
    monkeypatch.setattr(library, "installed", lambda: iter(()))
    with pytest.raises(ModelError, match=r"native cannot run foreign\.gguf: .*pip install 'xllamacpp") as caught:
        assembled("auto", foreign)
    assert "\n" not in str(caught.value)


def test_native_by_name_says_what_it_cannot_run(foreign: str) -> None:
    with pytest.raises(ModelError, match=r"native cannot run foreign\.gguf: .*--backend llama_cpp") as caught:
        assembled("native", foreign)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["native", "auto"])
def test_blocks_of_24_are_refused_with_one_line(backend: str) -> None:
    with pytest.raises(CLLMError) as caught:
        assembled(backend, resources__block_size=24)
    assert "resources.block_size is 24" in str(caught.value) and "multiple of 16" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "settings", "longest"),
    [
        ("native", {}, 0.25),
        ("native", {"scheduler__inter_token_target_ms": 400.0}, 0.4),
        ("native", {"scheduler__max_gap_ms": 120.0}, 0.12),
        ("llama_cpp", {}, 1.0),
        ("llama_cpp", {"scheduler__max_gap_ms": 120.0}, 0.12),
    ],
)
def test_the_longest_gap_suits_the_backend(backend: str, settings: Any, longest: float, tmp_path: Path) -> None:
    parts = parts_of(backend, str(write_model(tmp_path / "tiny.gguf")), **settings)
    with parts.backend:
        assert parts.scheduler.budget.max_gap_s == longest
