"""Layers with a window that have memory of their own: the bits of an answer do not depend on what is freed or cached,
in plain torch and in f32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm import LLM, SamplingParams
from cllm.backends.torch.backend import TorchBackend
from cllm.errors import BackendError
from cllm.kv.groups import LocalTable
from cllm.models.hf_directory import HFModel
from engine_kit import assert_nothing_left
from group_kit import GroupedSteps
from torch_kit import BLOCK, build, chunk, in_chunks, open_backend, random_tokens, save, save_whole

TOKENS = random_tokens(150)
KINDS = ["gemma3", "gemma4 E", "qwen2 window"]
SETTINGS: dict[str, Any] = {
    "resources.kv_type_k": "f32",
    "resources.kv_type_v": "f32",
    "resources.kv_cache_max_memory_mb": 16,
    "backend.torch.device": "cpu",
    "backend.torch.batch_invariant": True,
    "backend.threads": 1,
    "scheduler.max_step_tokens": 64,
}
EXACT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = [random_tokens(100 + 30 * seed, seed) for seed in range(3)]


def opened(path: Path, kv_type: str = "f32", **options: Any) -> TorchBackend:
    return TorchBackend(HFModel.open(path), device="cpu", kv_type=kv_type, threads=1, **options)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_behind_a_window_is_not_missed(kind: str, kv_type: str, tmp_path: Path) -> None:
    path = save(build(kind), tmp_path)
    with open_backend(path, kv_type=kv_type, invariant=True) as plain:
        expected = in_chunks(plain, TOKENS, 33)
    with opened(path, kv_type, invariant=True) as backend:
        for size in (33, 1, len(TOKENS)):
            steps = GroupedSteps(backend, kv_type)
            whole = steps.begin(len(TOKENS))
            for start in range(0, len(TOKENS), size):
                rows = steps.step((whole, TOKENS[start : start + size]))
            assert np.array_equal(rows[0], expected)
    assert len(whole.local.blocks) == -(-len(TOKENS) // BLOCK), "one chunk needs all of them"


def test_rows_of_all_kinds_go_together(tmp_path: Path) -> None:
    path = save(build("gemma3"), tmp_path)
    with open_backend(path) as plain:
        expected = [in_chunks(plain, TOKENS[:end], 64) for end in (91, 40, 3)]
    with opened(path) as backend:
        steps = GroupedSteps(backend)
        long, middle, short = (steps.begin(len(TOKENS)) for _ in range(3))
        steps.step((long, TOKENS[:60]), (short, TOKENS[:2]))
        steps.step((middle, TOKENS[:30]), (long, TOKENS[60:90]))
        found = steps.step((long, TOKENS[90:91]), (middle, TOKENS[30:40]), (short, TOKENS[2:3]))
        assert np.abs(found - np.stack(expected)).max() < 1e-4
        assert long.local.first > 0 and len(long.local.blocks) < 4, "it has what its window needs"


def test_a_table_without_what_a_window_needs_is_refused(tmp_path: Path) -> None:
    with opened(save(build("gemma3"), tmp_path)) as backend:
        steps = GroupedSteps(backend)
        sequence = steps.begin(64)
        steps.step((sequence, TOKENS[:40]))
        with pytest.raises(BackendError, match="does not say where the blocks of layers with a window are"):
            backend.collect([chunk(TOKENS[40:41], 40, sequence.blocks)])
        late = steps.chunk(sequence, TOKENS[40:41])
        late.local = LocalTable(2)
        late.local.blocks, late.local.cells = sequence.local.blocks[-1:], sequence.local.blocks[-1].cells
        with pytest.raises(BackendError, match="past the end of its blocks of layers with a window"):
            backend.collect([late])
        sequence.local.cells[0] = 1 << 20
        wrong = steps.chunk(sequence, TOKENS[40:41])
        wrong.local.cells[0] = 1 << 20
        with pytest.raises(BackendError, match="name block 1048576, but there are 400"):
            backend.collect([wrong])


# -- under the engine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole(build("gemma3"), tmp_path_factory.mktemp("models") / "tiny-gemma3")


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), settings=SETTINGS) as llm:
        yield llm


def bits(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    answers = llm.generate(prompts, EXACT, progress=False)
    return [[(each.token_id, each.logprob, each.top) for each in answer.logprobs or ()] for answer in answers]


def test_answers_are_those_of_a_cache_that_keeps_all(directory: Path, llm: LLM) -> None:
    assert llm.kv()["bytes_per_token"] == 2 * 2 * 32 * 4, "of the one full layer of seven"
    with LLM(str(directory), settings=SETTINGS | {"kv.free_behind_windows": False}) as other:
        assert other.kv()["bytes_per_token"] == 7 * 2 * 2 * 32 * 4
        expected = [bits(other, [prompt])[0] for prompt in PROMPTS]
    for _ in range(2):
        assert bits(llm, PROMPTS) == expected, "alone, among others, and cached"
    turn = [*PROMPTS[2], *(each[0] for each in expected[2]), *PROMPTS[0][:20]]
    answer = llm.generate([turn], EXACT)[0]
    assert answer.cached_tokens == (len(PROMPTS[2]) + 12 - 1) // BLOCK * BLOCK
    assert_nothing_left(llm._llm.executor.engine)
