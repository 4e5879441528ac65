"""The torch backend under the whole engine: a greedy answer does not depend on what else happens. f32, on the CPU."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm import LLM, SamplingParams
from cllm.backends.base import BackendTraits
from cllm.backends.torch.backend import TorchBackend
from cllm.backends.torch.worker import Setup
from cllm.config import load_config
from cllm.errors import ConfigError, ModelError
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.loading.backend_choice import choose_backend
from cllm.loading.resources import Weights
from cllm.loading.torch_model import _gpu_kv_bytes, check_gpu_room
from cllm.machine import MemoryLimit
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel
from cllm.text.chat_template import ChatTemplate
from engine_kit import assert_nothing_left
from loading_kit import load_parts
from native_kit import write_model
from torch_kit import build, random_tokens, save_whole

TOKEN_BYTES = 3 * 2 * 2 * 32 * 4
SETTINGS: dict[str, Any] = {
    "resources.kv_type_k": "f32",
    "resources.kv_type_v": "f32",
    "resources.kv_cache_max_memory_mb": 16,
    "backend.torch.device": "cpu",
    "backend.threads": 1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [random_tokens(20 + 7 * seed, seed) for seed in range(8)]
LONG = random_tokens(400, 99)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole(build("qwen3"), tmp_path_factory.mktemp("models") / "tiny-qwen3")


def open_llm(directory: Path, **changes: Any) -> LLM:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return LLM(str(directory), settings=SETTINGS | keys)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with open_llm(directory) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[list[int]]:
    """Each prompt's answer when nothing else runs and nothing is cached."""
    with open_llm(directory, scheduler__max_running=1) as fresh:
        answers = []
        for prompt in PROMPTS:
            empty_cache(fresh)
            answers.append(generated(fresh, [prompt])[0])
        assert len({tuple(answer) for answer in answers}) > 4, "answers that are all alike would prove nothing"
        return answers


def generated(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(answer.token_ids) for answer in llm.generate(prompts, params, progress=False)]


def engine_of(llm: LLM) -> Any:
    return llm._llm.executor.engine


def empty_cache(llm: LLM) -> None:
    engine, done = engine_of(llm), threading.Event()

    def reset() -> None:
        engine.scheduler.kv.reset()
        done.set()

    engine._inbox.append(reset)
    engine._wake.set()
    assert done.wait(10)


def test_batched_equals_alone(llm: LLM, alone: list[list[int]]) -> None:
    assert generated(llm, PROMPTS) == alone
    assert_nothing_left(engine_of(llm))


def test_cached_equals_uncached(llm: LLM, alone: list[list[int]]) -> None:
    generated(llm, PROMPTS)
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        (answer,) = llm.generate([prompt], GREEDY)
        assert answer.cached_tokens == (len(prompt) - 1) // 16 * 16 > 0
        assert list(answer.token_ids) == expected


@pytest.mark.parametrize("tokens", [1, 7, 32])
def test_chunked_equals_whole(directory: Path, llm: LLM, tokens: int) -> None:
    expected = generated(llm, [LONG])
    with open_llm(directory, scheduler__max_step_tokens=tokens) as other:
        assert generated(other, [LONG]) == expected


def test_beside_a_long_prompt_that_is_cut_into_chunks(directory: Path, llm: LLM, alone: list[list[int]]) -> None:
    expected = generated(llm, [LONG])
    with open_llm(directory, scheduler__max_step_tokens=24) as other:
        assert generated(other, [*PROMPTS, LONG]) == [*alone, *expected]


def test_preempted_equals_undisturbed(directory: Path, alone: list[list[int]]) -> None:
    tight = 26 * 16 * TOKEN_BYTES / 2**20 + 0.001
    with open_llm(directory, resources__kv_cache_max_memory_mb=tight, scheduler__watermark=0.0) as llm:
        assert generated(llm, PROMPTS) == alone
        assert engine_of(llm).snapshot.preemptions > 0
        assert_nothing_left(engine_of(llm))


def test_answers_that_share_a_prompt_equal_those_that_do_not(llm: LLM) -> None:
    def params(seed: int, n: int = 1) -> SamplingParams:
        return SamplingParams(temperature=0.9, seed=seed, n=n, max_tokens=12, ignore_eos=True)

    together = [list(answer.token_ids) for answer in llm.generate([PROMPTS[0]], params(11, 4))]
    apart = [generated(llm, [PROMPTS[0]], params(11 + number))[0] for number in range(4)]
    assert together == apart and len({tuple(answer) for answer in together}) > 1


def test_a_lost_context_is_rebuilt_and_nothing_shows(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = engine_of(llm).backend._worker
    original, steps = worker._forward, []

    def lose(*arguments: Any) -> Any:
        steps.append(arguments)
        if len(steps) == 5:
            raise RuntimeError("CUDA error: something is lost")
        return original(*arguments)

    before = engine_of(llm).snapshot.rebuilds
    monkeypatch.setattr(worker, "_forward", lose)
    assert generated(llm, PROMPTS) == alone
    assert engine_of(llm).snapshot.rebuilds == before + 1


@pytest.mark.parametrize(("kv_type", "head_bytes"), [("f16", 64), ("bf16", 64), ("fp8", 32), ("int8", 34)])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp8"])
def test_every_type_answers_and_takes_its_bytes(directory: Path, dtype: str, kv_type: str, head_bytes: int) -> None:
    changes = {"resources__kv_type_k": kv_type, "resources__kv_type_v": kv_type, "backend__torch__dtype": dtype}
    with open_llm(directory, **changes) as llm:
        assert llm.kv()["bytes_per_token"] == 3 * 2 * 2 * head_bytes
        first, second = (generated(llm, PROMPTS[:3]) for _ in range(2))
        assert first == second and all(len(answer) == 16 for answer in first)


def test_in_the_batch_invariant_mode_every_bit_is_equal(directory: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
    with open_llm(directory, backend__torch__batch_invariant=True, backend__torch__dtype="bf16") as llm:
        together = [answer.logprobs for answer in llm.generate(PROMPTS, params, progress=False)]
        for prompt, expected in zip(PROMPTS, together, strict=True):
            empty_cache(llm)
            assert llm.generate([prompt], params)[0].logprobs == expected


# -- how much of a GPU it takes -----------------------------------------------------------------------------------


class Sized:
    """What sizing asks of a backend."""

    traits = BackendTraits("torch", preferred_step_tokens=8192)
    spare_blocks = 1

    def __init__(self, directory: Path, free: int) -> None:
        self.spec = HFModel.open(directory).spec
        self._free = free
        self.tried: list[tuple[int, int]] = []

    def room(self, tokens: int, rows: int) -> MemoryLimit:
        self.tried.append((tokens, rows))
        return MemoryLimit("the memory of cuda:0", 24 << 30, self._free, hard=True)


def sized(directory: Path, free: int, **changes: Any) -> tuple[int, list[tuple[int, int]]]:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    backend: Any = Sized(directory, free)
    settings = load_config(None, keys).config
    return _gpu_kv_bytes(settings, backend, Weights("tiny", 4 << 30), 256), backend.tried


def test_a_gpu_gives_most_of_what_is_left(directory: Path) -> None:
    block = 16 * TOKEN_BYTES // 2
    assert sized(directory, 10 << 30) == (int(0.9 * (10 << 30)) - block, [(8448, 256)])
    assert sized(directory, 10 << 30, resources__kv_memory_fraction=0.5)[0] == (5 << 30) - block
    assert sized(directory, 10 << 30, resources__kv_cache_max_memory_mb=100)[0] == (100 << 20) - block
    assert sized(directory, 10 << 30, scheduler__max_step_tokens=64)[1] == [(320, 256)]


def test_a_gpu_that_has_too_little_is_one_line_with_the_numbers(directory: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_max_memory_mb is 20000, but the mem.* left after the weights \(4,096 MiB\)"
    ):
        sized(directory, 10 << 30, resources__kv_cache_max_memory_mb=20_000)
    for changes in ({}, {"resources__kv_cache_max_memory_mb": 100}):
        with pytest.raises(ConfigError) as nothing:
            sized(directory, 0, **changes)
        assert str(nothing.value).startswith(
            "the memory of cuda:0 (24,576 MiB) has 0 MiB left for the KV cache after the weights of tiny (4,096 MiB) "
            "and a step of 8448 tokens; lower scheduler.max_step_tokens (now 8192) and scheduler.max_running (now 256)"
        )
    room = MemoryLimit("the memory of cuda:1, A Small GPU", 8 << 30, 3 << 30, hard=True)
    with pytest.raises(ModelError) as caught:
        check_gpu_room(Weights("tiny", 4 << 30), "bf16", room)
    assert str(caught.value).startswith(
        "the weights of tiny take 4,096 MiB as bf16, but 3,072 MiB of the memory of cuda:1, A Small GPU (8,192 MiB) "
        "are free; use a smaller model"
    )


def test_a_gpu_has_larger_steps_and_both_have_the_models_own_context(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = TorchBackend(HFModel.open(directory), device="cpu")
    assert (on_cpu.traits.preferred_step_tokens, on_cpu.traits.context_cap) == (512, None)
    monkeypatch.setattr(Setup, "on_gpu", True)
    monkeypatch.setattr(TorchBackend, "_load", lambda *_: None)
    on_gpu = TorchBackend(HFModel.open(directory), device="cpu")
    assert (on_gpu.traits.preferred_step_tokens, on_gpu.traits.context_cap) == (8192, None)


@pytest.mark.parametrize("types", [{}, {"resources__kv_type_k": "int8", "resources__kv_type_v": "int8"}])
def test_what_was_used_again_outlives_the_server(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: dict[str, str]
) -> None:
    monkeypatch.setattr(DiskTier, "compute_seconds", lambda tier, blocks: 60.0)
    keys = {"kv__disk__enabled": True, "kv__disk__directory": str(tmp_path), **types}
    with open_llm(directory, **keys) as first:
        before = [generated(first, [LONG]) for _ in range(2)]
    with open_llm(directory, **keys) as later:
        answer = later.generate([LONG], GREEDY)[0]
        assert answer.cached_tokens == 384 and later.kv()["disk"]["loaded_tokens"] == 384
        assert list(answer.token_ids) == before[1][0]


# -- which backend runs --------------------------------------------------------------------------------------------


def opened(model: Path, backend: str = "auto", **changes: Any) -> Any:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    settings = SETTINGS | {"backend.type": backend, "model.name": str(model)} | keys
    return load_parts(load_config(None, settings).config)


def test_auto_takes_torch_for_a_directory(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cllm"):
        parts = opened(directory)
    with parts.backend:
        text, facts = parts.text, parts.text.facts
        assert (parts.backend.traits.name, facts.name, facts.max_context) == ("torch", "tiny-qwen3", 512)
        assert facts.bytes_per_token == TOKEN_BYTES and text.tokenizer.eos_ids == {1}
        messages = [{"role": "user", "content": "hello</s>"}]
        assert ChatTemplate.of(text.chat_template).encode(text.tokenizer, messages).count(1) == 1
    assert f"tokens of {TOKEN_BYTES:,} bytes" in caplog.text and "context: 512 tokens" in caplog.text
    assert "up to 256 sequences at once" in caplog.text


def test_a_gguf_file_on_torch_and_by_default_not(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    with opened(path, "torch").backend as backend:
        assert backend.traits.name == "torch"
    with opened(path, resources__kv_type_k="f16", resources__kv_type_v="f16").backend as backend:
        assert backend.traits.name == "native"


@pytest.mark.parametrize("backend", ["native", "llama_cpp"])
def test_others_do_not_take_directories(backend: str, directory: Path) -> None:
    with pytest.raises(ModelError, match=f"{backend} cannot run tiny-qwen3: it is a Hugging Face directory") as caught:
        opened(directory, backend, resources__kv_type_k="f16", resources__kv_type_v="f16")
    assert "\n" not in str(caught.value)


def test_torch_by_name_says_what_it_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"torch cannot run odd\.gguf: .*rope_freqs.*; use --backend auto"):
        opened(write_model(tmp_path / "odd.gguf", arch="qwen2", rope_scaling="llama3"), "torch")


def test_without_torch_it_says_how_to_install_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cllm.backends.torch.sources", None)
    with pytest.raises(ModelError, match=r"scripts/install\.py torch") as caught:
        opened(directory)
    assert "\n" not in str(caught.value)


def test_a_gpu_is_taken_by_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.loading.backend_choice.has_gpu", lambda config: True)
    with opened(write_model(tmp_path / "tiny.gguf")).backend as backend:
        assert backend.traits.name == "torch"
    monkeypatch.setattr("cllm.loading.backend_choice._check_llama_cpp_installed", lambda otherwise: None)
    foreign = write_model(tmp_path / "odd.gguf", arch="qwen2", rope_scaling="llama3")
    assert choose_backend(load_config(None, {}).config, GGUFModel.open(foreign)) == "llama_cpp"


def test_kv_types_belong_to_backends(directory: Path) -> None:
    for changes in ({"resources__kv_type_k": "q8_0"}, {"resources__kv_type_v": "bf16"}):
        with pytest.raises(ConfigError) as caught:
            opened(directory, **changes)
        assert re.search("torch (supports|uses one type)", str(caught.value)) and "\n" not in str(caught.value)


def test_a_context_that_is_too_long_is_refused(directory: Path) -> None:
    assert HFModel.open(directory).spec.context_length == 512
    with pytest.raises(ConfigError, match="the model was trained for 512 tokens"):
        opened(directory, resources__max_context_length=1024)
