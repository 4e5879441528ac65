"""Models whose layers carry a state, on llama.cpp: random ones of every kind that it knows."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm import LLM, SamplingParams
from cllm.backends.base import Chunk
from cllm.backends.llama_cpp import LlamaCppBackend
from cllm.backends.llama_cpp.context import Context
from cllm.backends.llama_cpp.slots import LlamaSlotOps
from cllm.engine.params import ContextWindow
from cllm.errors import BackendError, InvalidRequestError, ModelError, UnsupportedOperationError
from cllm.generation import Completion
from cllm.kv.ops import SlotGeometry
from cllm.kv.slots.snapshots import LEAST_APART
from cllm.models.gguf import GGUFModel
from states_kit import SHAPES, write_states_model
from step_of import rows_of

GREEDY = SamplingParams(temperature=0, max_tokens=24)
END = 1
ANSWERS = [7, 8, 9]
"""How an answer begins."""


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("states")

    def once(architecture: str) -> Path:
        path = folder / f"{architecture}.gguf"
        return path if path.exists() else write_states_model(path, architecture)

    return once


def opened(path: Path, **settings: Any) -> LLM:
    usual = {
        "resources.max_context_length": 1024,
        "resources.kv_cache_max_memory_mb": 16,
        "backend.llama_cpp.n_seq_max": 4,
        "backend.threads": 1,
        "kv.disk.enabled": False,
    }
    return LLM(str(path), backend="llama_cpp", settings=usual | settings)


def made(path: Path) -> LlamaCppBackend:
    options: dict[str, Any] = {"threads": 1, "n_batch": 64, "n_ubatch": 64, "kv_type_k": "f16", "kv_type_v": "f16"}
    return LlamaCppBackend(path, flash_attention=True, mmap=True, mlock=False, **options)


@pytest.fixture
def backend(write: Callable[[str], Path]) -> Iterator[LlamaCppBackend]:
    with made(write("qwen35")) as backend:
        backend.allocate(SlotGeometry(3, 256))
        yield backend


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all chunks that llama.cpp computes."""
    counts: list[int] = []
    decode = Context.decode

    def counting(self: Context, chunks: Any) -> Any:
        counts.extend(len(chunk.tokens) for chunk in chunks)
        return decode(self, chunks)

    monkeypatch.setattr(Context, "decode", counting)
    return counts


def message(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [*(rng.randrange(10, 300) for _ in range(tokens - 1)), END]


def answer(llm: LLM, prompt: list[int]) -> Completion:
    (completion,) = llm.generate([prompt], GREEDY, progress=False)
    return completion


def rows(completion: Completion) -> int:
    """Tokens of an answer that were computed to get the others; its end is not among `token_ids`."""
    return len(completion.token_ids) - (completion.finish_reason == "length")


SYSTEM, USER, OTHER = message(1, 200), message(2, 60), message(3, 50)
TOKENS = array("i", message(4, 120))


@pytest.mark.parametrize("architecture", SHAPES)
def test_states_are_put_back_and_moved_to_the_bit(write: Callable[[str], Path], architecture: str) -> None:
    path = write(architecture)
    with made(path) as backend:
        assert backend.resizes_slots and backend.traits.most_drafts == 0
        expected = GGUFModel.open(path).spec
        assert 0 <= backend.spec.state_bytes - expected.state_bytes < 2048, "the file says how large a state is"
        backend.allocate(SlotGeometry(3, 256, at_start=2))
        ops = backend.ops

        def step(slot: int, start: int, end: int) -> np.ndarray[Any, Any]:
            return rows_of(backend, [Chunk(TOKENS[start:end], start, 1, slot)])[0].copy()

        step(0, 0, 40)
        rows_of(backend, [Chunk(TOKENS[60:100], 0, 1, 1)])
        snapshot, there = ops.snapshot(0), ops.save(0)
        rows = [step(0, 40, 70), step(0, 70, 71)]
        saved, other = ops.save(0), ops.save(1)
        last = step(0, 71, 72)
        ops.restore(0, snapshot, 40)
        assert ops.length(0) == 40 and ops.shortest(0) == 40
        assert np.array_equal([step(0, 40, 70), step(0, 70, 71)], rows)
        for slots, slot in ((3, 2), (1, 0), (2, 1)):
            ops.resize(slots)
            ops.load(slot, saved)
            assert np.array_equal(step(slot, 71, 72), last)
            ops.restore(slot, snapshot, 40)
            assert np.array_equal([step(slot, 40, 70), step(slot, 70, 71)], rows)
        ops.load(0, there)
        assert np.array_equal([step(0, 40, 70), step(0, 70, 71)], rows)
        ops.remove(0, 0)
        ops.copy(1, 0)
        assert np.array_equal(step(0, 71, 72), last)
        ops.remove(0, 0)
        ops.load(0, other)
        assert ops.length(0) == 40


@pytest.mark.parametrize("architecture", SHAPES)
def test_logits_are_the_same_beside_other_sequences(write: Callable[[str], Path], architecture: str) -> None:
    def opened_backend() -> LlamaCppBackend:
        backend = made(write(architecture))
        backend.allocate(SlotGeometry(3, 256))
        return backend

    ours = [Chunk(TOKENS[:50], 0, 1, 0), Chunk(TOKENS[50:51], 50, 1, 0), Chunk(TOKENS[51:60], 51, 1, 0)]
    others = [Chunk(TOKENS[60:70], 0, 1, 1), Chunk(TOKENS[70:100], 10, 1, 1), Chunk(TOKENS[100:101], 40, 1, 1)]
    with opened_backend() as backend:
        alone = [rows_of(backend, [chunk])[0].copy() for chunk in ours]
    with opened_backend() as backend:
        rows_of(backend, [Chunk(TOKENS[1:30], 0, 1, 2)])
        together = [rows_of(backend, [other, chunk])[1].copy() for chunk, other in zip(ours, others, strict=True)]
    assert np.allclose(together, alone, atol=1e-3)


@pytest.mark.parametrize("architecture", SHAPES)
def test_answers_are_those_of_a_fresh_server_and_only_what_is_new_is_computed(
    write: Callable[[str], Path], computed: list[int], architecture: str
) -> None:
    def count() -> int:
        total = sum(computed)
        computed.clear()
        return total

    path, given = write(architecture), []
    with opened(path) as llm:

        def ask(prompt: list[int]) -> tuple[int, int]:
            """How many tokens were cached, and how many of the prompt were computed."""
            computed.clear()
            found = answer(llm, prompt)
            given.append((prompt, found.token_ids))
            return found.cached_tokens, count() - rows(found)

        first = SYSTEM + USER + ANSWERS
        assert ask(first) == (0, 263)
        assert ask(first) == (260, 3), "the same again"
        chat = [*first, *given[0][1]]
        chat += [] if chat[-1] == END else [END]
        follow_up = chat + OTHER + ANSWERS
        cached, new = ask(follow_up)
        assert new == len(follow_up) - cached <= len(OTHER + ANSWERS) + 2, "one of the answer, and its end"
        assert ask(first[:-1] + OTHER + ANSWERS) == (260, 55), "the answer is stripped"
        near = 2 if len(given[0][1]) == 24 else LEAST_APART  # a short answer ends too near to its beginning
        assert ask(chat + USER + ANSWERS)[1] <= len(USER + ANSWERS) + near, "the last message is edited"
        assert ask(SYSTEM + message(5, 70) + ANSWERS) == (200, 73), "an earlier message is edited"
        together = llm.generate([prompt for prompt, _ in given], GREEDY, progress=False)
        assert [each.token_ids for each in together] == [tokens for _, tokens in given]
        three = SamplingParams(temperature=0, max_tokens=24, n=3)
        assert [each.token_ids for each in llm.generate([first], three, progress=False)] == [given[0][1]] * 3
    for prompt, tokens in given[2:]:
        with opened(path) as fresh:
            assert answer(fresh, prompt).token_ids == tokens


@pytest.mark.parametrize("architecture", ["qwen35", "mamba2"])
@pytest.mark.usefixtures("loading_pays")
def test_what_was_on_disk_goes_on_after_a_restart(
    write: Callable[[str], Path], computed: list[int], tmp_path: Path, architecture: str
) -> None:
    disk = {"kv.disk.enabled": True, "kv.disk.directory": tmp_path, "kv.disk.max_mb": 64}
    path, prompt = write(architecture), SYSTEM + USER + ANSWERS
    prompt = message(6, 300) + prompt
    with opened(path, **disk) as llm:
        found = answer(llm, prompt)
    again, edited = prompt, prompt[:-4] + OTHER + ANSWERS
    with opened(path) as fresh:
        expected = [answer(fresh, each).token_ids for each in (again, edited)]
    assert found.token_ids == expected[0]
    for asked, tokens, at_most in ((again, expected[0], 3), (edited, expected[1], 3 + 50 + 60)):
        with opened(path, **disk) as llm:
            computed.clear()
            restarted = answer(llm, asked)
            assert restarted.token_ids == tokens
            assert sum(computed) - rows(restarted) == len(asked) - restarted.cached_tokens <= at_most + 4


def test_windows_beside_states_are_part_of_snapshots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_states_model(tmp_path / "windows.gguf", "lfm2", attention__sliding_window=32)
    prompts = [SYSTEM + USER + ANSWERS, SYSTEM + OTHER + ANSWERS, SYSTEM + USER + OTHER + ANSWERS]
    with opened(path) as llm:
        assert "all 4 slots are allocated at the start" in caplog.text, "its sequences cannot be moved"
        found = [answer(llm, prompt) for prompt in prompts]
        states = llm.kv()["details"]["states"]
    assert [each.cached_tokens for each in found] == [0, 200, 260]
    assert 0 < states["bytes"] <= states["snapshots"] * states["state_bytes"]
    for prompt, each in zip(prompts, found, strict=True):
        with opened(path) as fresh:
            assert answer(fresh, prompt).token_ids == each.token_ids


def test_without_room_for_states_it_is_said(write: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    with opened(write("qwen35"), **{"resources.kv_cache_max_memory_mb": 0.65}) as llm:
        assert "no room to keep states" in caplog.text
        assert [answer(llm, prompt).cached_tokens for prompt in (SYSTEM + USER, SYSTEM + OTHER)] == [0, 0]
        assert answer(llm, SYSTEM + USER + ANSWERS).cached_tokens in (0, 260)


def test_boundaries_count_where_answers_go_on_behind_them(write: Callable[[str], Path]) -> None:
    past_the_end = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with opened(write("lfm2")) as llm:
        llm.generate([SYSTEM + USER + ANSWERS], past_the_end, progress=False)
        (edited,) = llm.generate([SYSTEM + OTHER + ANSWERS], past_the_end, progress=False)
        report = llm.kv()
    assert edited.cached_tokens == 200
    assert report["details"]["states"]["used"] == 1
    (state,) = [group for group in report["groups"] if group["kind"] == "state"]
    assert state["evictable"] >= report["details"]["states"]["snapshots"] > 1 and state["block_bytes"] > 0


def test_prompts_are_scored_and_embedded(write: Callable[[str], Path]) -> None:
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    with opened(write("lfm2")) as llm:
        first, second = (llm.generate([SYSTEM], scored, progress=False)[0].prompt_logprobs for _ in range(2))
        assert first is not None and second is not None and len(first.logprobs) == len(SYSTEM) - 1
        assert np.allclose(first.logprobs, second.logprobs, atol=1e-3)
        assert len(llm.embed(["a text"])[0]) == 64


def test_what_a_state_does_not_allow_is_refused_by_name(write: Callable[[str], Path], backend: LlamaCppBackend) -> None:
    ops = backend.ops
    rows_of(backend, [Chunk(TOKENS[:40], 0, 1, 1)])
    for start, end in ((20, None), (4, 20), (0, 20)):
        with pytest.raises(
            UnsupportedOperationError, match=r"slot 1 of 40 positions .* recurrent layers cannot be cut"
        ):
            ops.remove(1, start, end)
    with pytest.raises(UnsupportedOperationError, match="recurrent layers cannot be cut"):
        ops.shift(1, 4, None, -2)
    with pytest.raises(BackendError):
        ops.restore(1, ops.snapshot(1)[:50], 40)
    rolling = SamplingParams(context_window=ContextWindow(recent=300, keep=4), max_tokens=2)
    with (
        opened(write("qwen35")) as llm,
        pytest.raises(InvalidRequestError, match=r"rolling windows .* recurrent layers cannot be cut"),
    ):
        llm.generate([SYSTEM], rolling, progress=False)


def test_a_step_is_not_interrupted(backend: LlamaCppBackend) -> None:
    """A state in the middle of a step would be lost, also that of sequences which have no part in it."""
    decode = backend._live().library.decode

    def interrupted(*args: Any) -> int:
        backend.abort()
        code: int = decode(*args)
        return code

    backend._live().library.decode = interrupted
    try:
        rows_of(backend, [Chunk(TOKENS[:40], 0, 1, 0)])
    finally:
        backend._live().library.decode = decode
    assert backend.ops.length(0) == 40


def test_a_state_that_cannot_be_put_back_is_refused_at_the_start(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back = LlamaSlotOps.restore

    def elsewhere(self: LlamaSlotOps, slot: int, snapshot: Any, length: int) -> None:
        self.remove(slot, 0)
        self._context.decode([Chunk(TOKENS[:1], 0, False, slot)])
        put_back(self, slot, self.snapshot(slot), length)

    def failing(self: LlamaSlotOps, *_: object) -> None:
        raise BackendError("no such bytes")

    for broken, reason in ((elsewhere, "other values than before"), (failing, "no such bytes")):
        monkeypatch.setattr(LlamaSlotOps, "restore", broken)
        with pytest.raises(ModelError, match=f"cannot put the state of rwkv7 models back .*{reason}.* another model"):
            made(write("rwkv7"))
