"""K/V on disk under the native engine: answers after a restart are those of an uncached run, to the bit."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from architecture_kit import TINY, write_tiny
from cllm import LLM, SamplingParams
from cllm.backends.native import NativeBackend
from cllm.generation import Completion
from cllm.kv.disk.store import LOOK_INTERVAL_S
from cllm.models.gguf import GGUFModel
from native_disk import EXACT, prompt, settings
from native_kit import write_model
from repository import KITS
from thorough import slow

pytestmark = pytest.mark.usefixtures("loading_pays")

PROMPTS = 4
KILLS = 5
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def uncached(model: Path) -> list[Any]:
    answers = []
    for number in range(PROMPTS):
        with LLM(str(model), backend="native", settings=settings(None)) as llm:
            (answer,) = llm.generate([prompt(number)], EXACT)
            assert answer.cached_tokens == 0
            answers.append(bits(answer))
    return answers


def bits(answer: Completion) -> Any:
    assert answer.logprobs is not None
    return [(each.token_id, each.logprob, each.top) for each in answer.logprobs]


def opened(model: Path, directory: Path, **others: Any) -> LLM:
    return LLM(str(model), backend="native", settings=settings(str(directory)) | others)


def test_a_restart_loses_nothing(model: Path, uncached: list[Any], tmp_path: Path) -> None:
    with opened(model, tmp_path) as llm:
        for number in range(PROMPTS):
            assert bits(llm.generate([prompt(number)], EXACT)[0]) == uncached[number]
    with opened(model, tmp_path) as llm:
        answers = [llm.generate([prompt(number)], EXACT)[0] for number in range(PROMPTS)]
        assert [bits(answer) for answer in answers] == uncached
        assert all(answer.cached_tokens == 688 for answer in answers)
        disk = llm.kv()["disk"]
        assert disk["loaded_tokens"] >= 4 * 96 + 3 * 592 and disk["failed_loads"] == 0
        assert disk["read_bytes"] > 0 and llm.kv()["referenced"] == 0


def test_all_at_once_find_it_too(model: Path, uncached: list[Any], tmp_path: Path) -> None:
    with opened(model, tmp_path) as llm:
        llm.generate([prompt(number) for number in range(PROMPTS)], EXACT, progress=False)
    with opened(model, tmp_path) as llm:
        answers = llm.generate([prompt(number) for number in range(PROMPTS)], EXACT, progress=False)
        assert [bits(answer) for answer in answers] == uncached
        assert all(answer.cached_tokens >= 592 for answer in answers)


def test_two_servers_share_a_directory(model: Path, uncached: list[Any], tmp_path: Path) -> None:
    with opened(model, tmp_path) as first, opened(model, tmp_path) as second:
        assert bits(first.generate([prompt(0)], EXACT)[0]) == uncached[0]
        until = time.monotonic() + LIMIT_S
        while not first.kv()["disk"]["written_bytes"]:
            assert time.monotonic() < until, "nothing was written"
            time.sleep(0.05)
        time.sleep(LOOK_INTERVAL_S)  # what others wrote is looked for if something is missed, and no more often
        second.generate([prompt(3, 100)], SamplingParams(max_tokens=1))
        time.sleep(0.2)
        answer = second.generate([prompt(0)], EXACT)[0]
        assert bits(answer) == uncached[0] and answer.cached_tokens == 688


def test_another_model_or_type_finds_nothing(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as llm:
        llm.generate([prompt(0)], EXACT)
    other = write_model(tmp_path / "other.gguf", n_layers=4, head_dim=32, weight_type="q8_0", seed=1)
    types = {"resources.kv_type_k": "q8_0", "resources.kv_type_v": "q8_0"}
    for path, changes in ((other, {}), (model, types), (model, {"resources.block_size": 32})):
        with opened(path, tmp_path, **changes) as llm:
            assert llm.generate([prompt(0)], EXACT)[0].cached_tokens == 0
            assert llm.kv()["details"]["disk"]["known"]


def test_the_start_says_where_it_is_kept(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cllm"), opened(model, tmp_path):
        pass
    (line,) = [each for each in caplog.messages if "storing K/V of prompts" in each]
    assert str(tmp_path) in line and "at most 64 MiB" in line and "kv.disk.enabled: false" in line


def test_a_directory_that_cannot_be_used_costs_nothing(
    model: Path, uncached: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a directory")
    with opened(model, tmp_path / "file") as llm:
        assert any(f"cannot store K/V in {tmp_path / 'file'}" in line for line in caplog.messages), "at the start"
        answer = llm.generate([prompt(0)], EXACT)[0]
        assert bits(answer) == uncached[0] and answer.cached_tokens == 0


@slow
def test_a_server_may_be_killed_while_it_writes(model: Path, uncached: list[Any], tmp_path: Path) -> None:
    rng = random.Random(1)
    command = [sys.executable, str(KITS / "native_disk.py"), str(model), str(tmp_path), str(PROMPTS)]
    found = 0
    for _ in range(KILLS):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            answered = rng.randint(1, PROMPTS)
            for _ in range(answered):
                number, tokens, cached = json.loads(process.stdout.readline())
                assert tokens == [token for token, _, _ in uncached[number]]
                found += cached
            time.sleep(rng.random() * 0.5)
            process.kill()
    assert found > 0
    with opened(model, tmp_path) as llm:
        answers = [llm.generate([prompt(number)], EXACT)[0] for number in range(PROMPTS)]
        assert [bits(answer) for answer in answers] == uncached
        assert llm.kv()["details"]["disk"]["counts"].get("damaged", 0) == 0


def test_keys_that_a_longer_context_turns_in_another_way_are_others(tmp_path: Path) -> None:
    model = GGUFModel.open(write_tiny(tmp_path / "tiny.gguf", TINY["phi3"]))
    identities = []
    for context in (32, 64, 128, 256):
        with NativeBackend(
            model, threads=1, instruction_set="auto", kv_type_k="f16", kv_type_v="f16", context=context
        ) as backend:
            identities.append(backend.kv_identity)
    assert identities[0] == identities[1] != identities[2] == identities[3]


@pytest.mark.model
@slow
def test_llama_cpp_finds_it_too(tmp_path: Path) -> None:
    sentence = "It was a quiet morning in the village, and nothing had happened yet. "
    keys = settings(str(tmp_path)) | {"kv.disk.max_mb": 512, "resources.kv_cache_max_memory_mb": 200}
    answers = []
    for _ in range(2):
        with LLM("smollm2", backend="llama_cpp", settings=keys) as llm:
            answers.append(llm.generate(sentence * 40 + "Then", EXACT)[0])
    first, second = answers
    assert first.cached_tokens == 0 and second.cached_tokens >= 512
    assert second.token_ids == first.token_ids
