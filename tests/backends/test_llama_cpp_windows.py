"""Models with sliding windows on llama.cpp: their memory has two parts, and one of them forgets."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm import LLM, SamplingParams
from cllm.backends.base import Chunk
from cllm.backends.llama_cpp import LlamaCppBackend
from cllm.backends.llama_cpp.state import PartedState, WholeState, portable_state
from cllm.engine.params import ContextWindow
from cllm.errors import BackendError, InvalidRequestError
from cllm.kv.ops import SavedKV, SlotGeometry
from native_kit import sliding_window
from step_of import rows_of

TOKENS = array("i", [40 + number * 7 % 200 for number in range(900)])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sliding_window().write(tmp_path_factory.mktemp("windows") / "windows.gguf")


@pytest.fixture
def backend(path: Path) -> Iterator[LlamaCppBackend]:
    options: dict[str, Any] = {"threads": 1, "n_batch": 64, "n_ubatch": 64, "kv_type_k": "f16", "kv_type_v": "f16"}
    with LlamaCppBackend(path, flash_attention=True, mmap=True, mlock=False, **options) as backend:
        assert backend.resizes_slots
        backend.allocate(SlotGeometry(3, 1024, at_start=1))
        yield backend


def compute(backend: LlamaCppBackend, slot: int, start: int, end: int) -> np.ndarray[Any, Any]:
    return rows_of(backend, [Chunk(TOKENS[start:end], start, 1, slot)])[0].copy()


def test_what_is_moved_goes_on_to_the_bit_however_many_slots_there_are(backend: LlamaCppBackend) -> None:
    compute(backend, 0, 0, 500)
    saved = backend.ops.save(0)
    expected = compute(backend, 0, 500, 501)
    for slots, slot in ((3, 2), (2, 1), (1, 0)):
        backend.ops.resize(slots)
        backend.ops.load(slot, saved)
        assert backend.ops.length(slot) == 500
        saved = backend.ops.save(slot)
        assert (compute(backend, slot, 500, 501) == expected).all()
    backend.ops.resize(2)
    backend.ops.load(0, saved)
    backend.ops.copy(0, 1)
    assert (compute(backend, 1, 500, 501) == expected).all()


def test_nothing_goes_on_behind_what_a_window_has_dropped(backend: LlamaCppBackend) -> None:
    ops = backend.ops
    compute(backend, 0, 0, 20)
    assert (ops.shortest(0), ops.shortest(0, moved=True)) == (0, 0), "the window is not full yet"
    for start in range(20, 900, 40):
        compute(backend, 0, start, start + 40)
    shortest = ops.shortest(0)
    assert 500 < shortest < 900 and ops.shortest(0, moved=True) == ops.shortest_saved(ops.save(0)) == 899
    with pytest.raises(BackendError, match=f"attend to before position {shortest - 1}"):
        ops.remove(0, shortest - 1)
    assert ops.length(0) == 900
    ops.remove(0, shortest)
    again = compute(backend, 0, shortest, shortest + 1)
    ops.remove(0, 0)
    for start in range(0, shortest, 40):
        compute(backend, 0, start, min(start + 40, shortest))
    assert np.abs(compute(backend, 0, shortest, shortest + 1) - again).max() < 0.05


def test_answers_are_those_of_a_fresh_server(path: Path) -> None:
    """Whatever prefixes prompts share, and however long those that were computed before are."""
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    begin = [*TOKENS[:300]]
    prompts = [[*begin, *([50] * n)] for n in (2, 200, 3, 400, 1)] + [begin[:40], [*begin[:150], 99]]
    settings = {"backend.llama_cpp.n_seq_max": 2, "resources.kv_cache_max_memory_mb": 64, "backend.threads": 1}
    settings |= {"backend.llama_cpp.n_ubatch": 64, "kv.disk.enabled": False, "drafts.enabled": False}
    with LLM(str(path), backend="llama_cpp", settings=settings) as llm:
        one_by_one = [llm.generate([prompt], greedy, progress=False)[0] for prompt in prompts]
        cached = [answer.cached_tokens for answer in one_by_one]
        together = llm.generate(prompts, greedy, progress=False)
    for prompt, first, second in zip(prompts, one_by_one, together, strict=True):
        with LLM(str(path), backend="llama_cpp", settings=settings) as fresh:
            (answer,) = fresh.generate([prompt], greedy, progress=False)
        assert answer.token_ids == first.token_ids == second.token_ids
    assert cached[1] >= 300 and cached[4] == 0, "forgotten, so it is computed again"


def test_rolling_windows_need_whole_windows(path: Path) -> None:
    settings: dict[str, Any] = {"resources.max_context_length": 1024, "kv.disk.enabled": False}
    rolling = SamplingParams(context_window=ContextWindow(recent=300, keep=4), max_tokens=2, ignore_eos=True)
    with (
        LLM(str(path), backend="llama_cpp", settings=settings) as llm,
        pytest.raises(InvalidRequestError, match=r"kv\.window\.recent is set"),
    ):
        llm.generate([[5] * 40], rolling, progress=False)
    with LLM(str(path), backend="llama_cpp", settings=settings | {"kv.window.recent": 300}) as llm:
        assert len(llm.generate([[5] * 40], rolling, progress=False)[0].token_ids) == 2


@pytest.mark.parametrize(("parts", "kind"), [(1, WholeState), (2, PartedState)])
def test_the_form_is_known_by_an_empty_sequence(parts: int, kind: type[Any]) -> None:
    for slots in (1, 2, 5):
        empty: SavedKV = np.array([77, 0, *[slots, *[0] * slots] * parts], np.uint32).view(np.uint8)
        assert type(portable_state(empty, slots, 64)) is kind
    for unknown in ([77, 0, 1, 0, 1], [77, 0, 2, 0, 2, 0], [77, 0], [77, 0, *[1, 0] * 3]):
        with pytest.raises(BackendError, match="unknown format"):
            portable_state(np.array(unknown, np.uint32).view(np.uint8), 1, 64)
