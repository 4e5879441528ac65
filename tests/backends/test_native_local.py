"""Layers with a window on the native engine, with memory of their own: the bits of an answer do not depend on what is
cached, kept, freed or loaded, and a long text takes no more for them than a short one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st

from cllm import LLM, SamplingParams
from cllm.engine.params import ContextWindow
from cllm.errors import InvalidRequestError
from cllm.generation import Completion
from llm_kit import assert_idle, empty_cache, engine_of
from native_disk import prompt, settings
from native_kit import build_model, float_tensor
from thorough import sampled

WINDOW = 40
REBUILT = ((592 - 39) // 16 * 16 - 5 * 39) // 16 * 16
"""From where windows are computed again behind 592 tokens: the last of six layers needs all of its own, and each of the
others as much before that."""
EXACT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


def write_windowed(path: Path, **options: Any) -> Path:
    """A small Gemma 3: five layers of six attend to the last tokens."""
    plain = build_model(arch="qwen3", n_layers=7, head_dim=32, n_kv_heads=1, tied=True, **options)
    rng = np.random.default_rng(3)
    norms = {
        f"blk.{layer}.{role}.weight": float_tensor(rng.normal(1.0, 0.1, 64))
        for layer in range(7)
        for role in ("post_attention_norm", "post_ffw_norm")
    }
    metadata = {key.replace("qwen3.", "gemma3."): value for key, value in plain.metadata.items()}
    metadata["gemma3.attention.sliding_window"] = WINDOW
    return replace(plain, architecture="gemma3", metadata=metadata, tensors=plain.tensors | norms).write(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_windowed(tmp_path_factory.mktemp("windowed") / "tiny.gguf")


def opened(model: Path, directory: Path | None = None, **others: Any) -> LLM:
    wanted = settings(None if directory is None else str(directory))
    changes = {"drafts.enabled": False, "scheduler.max_step_tokens": 64} | others
    return LLM(str(model), backend="native", settings=wanted | changes)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with opened(model) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Any]:
    """With all K/V kept, as of a model without windows."""
    with opened(model, **{"kv.free_behind_windows": False}) as llm:
        return [bits(llm.generate([prompt(number)], EXACT)[0]) for number in range(4)]


def bits(answer: Completion) -> Any:
    assert answer.logprobs is not None
    return [(each.token_id, each.logprob, each.top) for each in answer.logprobs]


def test_what_is_freed_is_not_missed(llm: LLM, alone: list[Any]) -> None:
    kv = llm.kv()
    assert kv["bytes_per_token"] == 2 * 2 * 32, "of the one full layer"
    for number in range(4):
        empty_cache(llm)
        assert bits(llm.generate([prompt(number)], EXACT)[0]) == alone[number]
    assert_idle(llm)


def test_batched_and_cached_equals_alone(llm: LLM, alone: list[Any]) -> None:
    empty_cache(llm)
    for _ in range(2):
        answers = llm.generate([prompt(number) for number in range(4)], EXACT, progress=False)
        assert [bits(answer) for answer in answers] == alone
    assert all(answer.cached_tokens == 699 // 16 * 16 for answer in answers)
    engine_of(llm).scheduler.kv.check()
    assert_idle(llm)


def test_the_next_turn_goes_on_where_the_last_one_ended(llm: LLM) -> None:
    empty_cache(llm)
    first = llm.generate([prompt(0)], EXACT)[0]
    turn = [*prompt(0), *first.token_ids, *prompt(1)[:50]]
    second = llm.generate([turn], EXACT)[0]
    assert second.cached_tokens == (700 + 12 - 1) // 16 * 16
    empty_cache(llm)
    assert bits(llm.generate([turn], EXACT)[0]) == bits(second)


def test_a_shared_beginning_is_computed_again_once(llm: LLM) -> None:
    """The second request shows where they part, and leaves there what the third needs. It computes only windows again,
    from the sixth one before."""
    empty_cache(llm)
    texts = [[*prompt(0)[:600], *prompt(number)[600:]] for number in (0, 3, 6)]
    found = [llm.generate([text], EXACT)[0].cached_tokens for text in texts]
    assert found == [0, REBUILT, 592]
    assert llm.kv()["windows_rebuilt"] >= 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scheduler.max_step_tokens": 16},
        {"scheduler.max_step_tokens": 2048},
        {"resources.kv_type_k": "q8_0", "resources.kv_type_v": "q8_0"},
        {"resources.kv_type_k": "q4_0", "resources.kv_type_v": "q4_0"},
    ],
    ids=str,
)
def test_windows_computed_again_by_themselves_give_the_same_bits(model: Path, changes: dict[str, Any]) -> None:
    texts = [[*prompt(0)[:600], *prompt(number)[600:]] for number in (0, 3, 6)]
    with opened(model, **changes) as llm:
        expected = []
        for text in texts:
            empty_cache(llm)
            expected.append(bits(llm.generate([text], EXACT)[0]))
        for number in (1, 2):  # alone, and with somebody who goes on from the snapshot that this leaves
            empty_cache(llm)
            llm.generate([texts[0]], EXACT)
            answers = llm.generate(texts[1 : 1 + number], EXACT, progress=False)
            assert [bits(answer) for answer in answers] == expected[1 : 1 + number]
            assert answers[0].cached_tokens == REBUILT
        engine_of(llm).scheduler.kv.check()
        assert_idle(llm)


@settings_of(max_examples=sampled(8), deadline=None)
@given(common=st.integers(300, 690), other=st.integers(1, 9), cut=st.integers(0, 200))
def test_wherever_texts_part_the_bits_are_the_same(llm: LLM, common: int, other: int, cut: int) -> None:
    text = [*prompt(0)[:common], *prompt(other)[common : 700 - cut]]
    empty_cache(llm)
    expected = bits(llm.generate([text], EXACT)[0])
    empty_cache(llm)
    llm.generate([prompt(0)], EXACT)
    before = llm.kv()["windows_rebuilt"]
    answer = llm.generate([text], EXACT)[0]
    assert bits(answer) == expected
    assert llm.kv()["windows_rebuilt"] - before == (0 < answer.cached_tokens < 650)


def test_those_who_wait_for_a_beginning_find_it(llm: LLM) -> None:
    empty_cache(llm)
    texts = [[*prompt(0)[:600], *prompt(number)[600:]] for number in (0, 3, 6, 9)]
    answers = llm.generate(texts, EXACT, progress=False)
    assert sorted(answer.cached_tokens for answer in answers) == [0, 592, 592, 592]


def test_drafts_change_nothing(model: Path, alone: list[Any]) -> None:
    with opened(model, **{"drafts.enabled": True}) as llm:
        for number in (0, 1, 0, 1):
            assert bits(llm.generate([prompt(number)], EXACT)[0]) == alone[number]


def test_preempted_equals_undisturbed(model: Path, alone: list[Any]) -> None:
    cell = 16 * 128  # bytes
    local = 6 * (3 + 4 + 1)
    room = (2 * (45 + local) + 40) * cell / 2**20
    with opened(model, **{"resources.kv_cache_max_memory_mb": room, "scheduler.watermark": 0.0}) as llm:
        long = replace(EXACT, max_tokens=200)
        answers = llm.generate([prompt(number) for number in range(4)], long, progress=False)
        assert [bits(answer)[:12] for answer in answers] == alone
        assert engine_of(llm).snapshot.preemptions > 0
        assert_idle(llm)


@pytest.mark.usefixtures("loading_pays")
def test_a_restart_loses_nothing(model: Path, alone: list[Any], tmp_path: Path) -> None:
    with opened(model, tmp_path) as llm:
        for number in range(4):
            assert bits(llm.generate([prompt(number)], EXACT)[0]) == alone[number]
    with opened(model, tmp_path) as llm:
        answers = [llm.generate([prompt(number)], EXACT)[0] for number in range(4)]
        assert [bits(answer) for answer in answers] == alone
        assert all(answer.cached_tokens == 688 for answer in answers)
        assert llm.kv()["disk"]["failed_loads"] == 0 and llm.kv()["referenced"] == 0


def test_local_layers_take_the_same_however_long_the_text_is(llm: LLM) -> None:
    kv: Any = engine_of(llm).scheduler.kv
    most = 0

    def watch(chunks: Any) -> Any:
        nonlocal most
        most = max(most, *(len(chunk.local.blocks) for chunk in chunks))
        return step(chunks)

    backend: Any = engine_of(llm).backend
    step = backend.collect
    backend.collect = watch
    try:
        empty_cache(llm)
        llm.generate([prompt(0, 1900)], EXACT)
    finally:
        del backend.collect
    assert most <= kv.arena.local.most_blocks == 3 + 4 + 1


def test_an_edited_message_costs_what_follows_the_one_before(llm: LLM) -> None:
    """Messages end with <|im_end|>, the model's end of text."""
    empty_cache(llm)
    end = 1
    messages = [[*prompt(number, 150), end] for number in range(4)]
    chat = [token for message in messages for token in message]
    llm.generate([chat], replace(EXACT, ignore_eos=False))
    edited = [*messages[0], *messages[1], *prompt(7, 150), end, *messages[3]]
    answer = llm.generate([edited], EXACT)[0]
    assert answer.cached_tokens == 2 * 151 // 16 * 16
    empty_cache(llm)
    assert bits(llm.generate([edited], EXACT)[0]) == bits(answer)


def test_rolling_windows_are_refused_by_name(llm: LLM, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    rolling = replace(EXACT, context_window=ContextWindow(recent=300, keep=4))
    with pytest.raises(InvalidRequestError, match="sliding window of their own; use --backend llama_cpp"):
        llm.generate([prompt(0)], rolling)
    with LLM(str(model), settings=settings(None) | {"kv.window.recent": 300}) as rolls:
        assert len(rolls.generate([prompt(0)], rolling)[0].token_ids) == 12
    assert "native cannot run tiny.gguf: kv.window.recent is set, but some of its layers" in caplog.text


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_quantised_memory_is_apart_in_the_same_way(model: Path, kind: str) -> None:
    kinds = {"resources.kv_type_k": kind, "resources.kv_type_v": kind}
    answers = []
    for apart in (True, False):
        with opened(model, **{"kv.free_behind_windows": apart}, **kinds) as llm:
            answers.append([bits(llm.generate([prompt(number)], EXACT)[0]) for number in (0, 3, 0)])
    assert answers[0] == answers[1]


def test_while_idle_a_sequence_may_stay_with_its_windows(model: Path) -> None:
    with opened(model, **{"resources.max_context_length": 1024, "resources.kv_cache_max_memory_mb": 0.5}) as llm:
        kv = engine_of(llm).scheduler.kv
        windows = kv.arena.local.most_blocks * kv.arena.local.shape.cells * kv.arena.block_bytes
        assert kv.upkeep.settings.idle_bytes == 1024 * 128 + windows
