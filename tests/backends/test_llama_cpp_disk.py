"""Saved sequences of llama.cpp: what comes from disk goes on to the bit like what never left memory.

llama.cpp's own arithmetic depends on how many tokens a step has. So an answer with a cached beginning is compared with
one whose beginning was cached in memory, at the same place; one without is compared with one without.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm.backends.base import Chunk, Logits
from cllm.backends.llama_cpp import LlamaCppBackend
from cllm.kv.ops import SavedKV, SlotGeometry
from cllm.models.registry import resolve
from llama_disk import CACHED, EXACT, PROMPTS, TOKENS, alike, bits, opened, prompt
from repository import KITS
from step_of import rows_of
from thorough import slow

pytestmark = [slow, pytest.mark.usefixtures("loading_pays")]

KILLS = 4


@pytest.fixture(scope="module")
def without_disk(model: Path) -> dict[tuple[int, int], Any]:
    """What a server without a disk answers, by prompt and by how much of it was cached."""
    answers = {}
    for before in (None, alike):
        with opened(str(model), None) as llm:
            for number in range(PROMPTS):
                if before is not None:
                    llm.generate([before(number)], EXACT)
                (answer,) = llm.generate([prompt(number)], EXACT)
                assert answer.cached_tokens == (CACHED if before else 0)
                answers[number, answer.cached_tokens] = bits(answer)
    return answers


def make(path: Path, slots: int, slot_tokens: int = 768, **settings: Any) -> LlamaCppBackend:
    defaults: dict[str, Any] = {"kv_type_k": "f16", "kv_type_v": "f16", "flash_attention": True}
    options = {"threads": 1, "n_batch": 1024, "n_ubatch": 512, "mmap": True, "mlock": False} | defaults | settings
    backend = LlamaCppBackend(path, **options)
    backend.allocate(SlotGeometry(slots, slot_tokens, at_start=slots))
    return backend


def compute(backend: LlamaCppBackend, slot: int, tokens: array[int], start: int, count: int) -> Logits:
    return rows_of(backend, [Chunk(tokens[start : start + count], start, True, slot)])[0].copy()


def compare(path: Path, count: int, tails: tuple[int, ...], **settings: Any) -> None:
    tokens = array("i", prompt(3)[:count])
    with make(path, 2, **settings) as one, make(path, 4, **settings) as other:
        whole = compute(one, 0, tokens, 0, count)
        saved: SavedKV = np.frombuffer(one.ops.save(0).tobytes(), np.uint8)
        for tail in tails:
            start = count - tail
            one.ops.remove(0, start)
            in_memory = compute(one, 0, tokens, start, tail)
            for backend, slot in ((one, 1), (other, 0), (other, 3)):
                backend.ops.load(slot, saved.copy())
                backend.ops.remove(slot, start)
                assert np.array_equal(compute(backend, slot, tokens, start, tail), in_memory), (tail, slot)
                backend.ops.remove(slot, 0)
            # Not to the bit: a step of few tokens sums in another order than one of many.
            assert np.abs(in_memory - whole).max() < 1.0


@pytest.mark.parametrize(
    "settings",
    [{}, {"flash_attention": False}, {"kv_type_k": "q8_0", "kv_type_v": "q8_0"}, {"kv_type_k": "q4_0"}],
    ids=["flash", "plain", "q8_0", "q4_0"],
)
def test_what_was_saved_goes_on_to_the_bit_in_another_context(model: Path, settings: dict[str, Any]) -> None:
    compare(model, TOKENS, (1, 2, 12, 40, 188), **settings)


def test_what_was_computed_in_another_context_length_is_not_taken_for_the_same(model: Path) -> None:
    """Some models turn positions another way where the context is long."""
    identities = []
    for slots, slot_tokens in ((2, 768), (4, 768), (2, 1024)):
        with make(model, slots, slot_tokens) as backend:
            identities.append(backend.kv_identity)
    assert identities[0] == identities[1] != identities[2]


@pytest.mark.model
def test_so_does_the_real_model() -> None:
    compare(resolve("smollm2"), 200, (1, 12))


def test_a_restart_loses_nothing(model: Path, without_disk: dict[tuple[int, int], Any], tmp_path: Path) -> None:
    for cached in (0, CACHED):
        with opened(str(model), str(tmp_path)) as llm:
            for number in range(PROMPTS):
                (answer,) = llm.generate([prompt(number)], EXACT)
                assert answer.cached_tokens == cached
                assert bits(answer) == without_disk[number, cached]


def test_what_a_small_memory_loses_is_on_disk(
    model: Path, without_disk: dict[tuple[int, int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits between requests, so nothing is saved but what leaves memory."""
    monkeypatch.setattr("cllm.kv.slots.offload.QUIET_S", 1e9)
    monkeypatch.setattr("cllm.kv.slots.offload.STOOD_S", 1e9)
    with opened(str(model), str(tmp_path)) as llm:
        for number in range(PROMPTS):
            llm.generate([prompt(number)], EXACT)
        assert llm.kv()["evictions"] > 0
        parts = llm._llm.executor.parts
        assert parts is not None and parts.disk is not None and parts.disk.store.flush()
        (answer,) = llm.generate([prompt(0)], EXACT)
        assert answer.cached_tokens == CACHED and bits(answer) == without_disk[0, CACHED]
        assert llm.kv()["disk"]["loads"] == 1


def test_a_server_may_be_killed_at_any_moment(
    model: Path, without_disk: dict[tuple[int, int], Any], tmp_path: Path
) -> None:
    rng = random.Random(1)
    found = 0
    for seed in range(KILLS):
        lines = _until_killed(model, tmp_path, seed, after_s=rng.choice([0.1, 0.5, 1.5]) * rng.random())
        for number, cached, answer in lines:
            assert answer == without_disk[number, cached], (number, cached)
            found += cached > 0
    assert found > 0, "nothing was ever found on disk"
    with opened(str(model), str(tmp_path)) as llm:
        for number in range(PROMPTS):
            (answer,) = llm.generate([prompt(number)], EXACT)
            assert bits(answer) == without_disk[number, answer.cached_tokens]
        counts: dict[str, int] = llm.kv()["details"]["disk"]["counts"]
        assert counts.get("damaged", 0) == counts.get("misplaced", 0) == 0


def _until_killed(model: Path, directory: Path, seed: int, after_s: float) -> list[Any]:
    """What a server answered before it was killed, so long after it was ready, or after its last answer."""
    command = [sys.executable, str(KITS / "llama_disk.py"), str(model), str(directory), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        output = process.stdout
        assert output is not None and output.readline() == "ready\n"
        late = bool(seed % 2)  # every other one has answered all, and writes
        killer: Callable[[], None] = process.kill
        if not late:
            threading.Timer(after_s, killer).start()
        lines = []
        for line in output:
            if line == "done\n":
                if late:
                    threading.Timer(0.5 + after_s, killer).start()
            elif line.endswith("\n"):
                lines.append(json.loads(line))
        return lines
