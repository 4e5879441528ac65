"""With `backend.type` auto, a GPU is left alone where torch would not start on it. The GPU is imitated."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from cllm.backends.base import BackendTraits
from cllm.backends.torch.backend import TorchBackend
from cllm.backends.torch.device import choose_dtype, is_out_of_memory
from cllm.config import load_config
from cllm.errors import BackendError, ConfigError, ModelError
from cllm.loading.backend_choice import choose_backend
from cllm.loading.resources import Weights
from cllm.loading.torch_model import _gpu_kv_bytes, open_torch
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel
from native_kit import write_model
from torch_kit import build, save_whole

GPU = torch.device("cuda", 0)


class Gpu:
    capability = (9, 0)
    free = 8 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    for name, answer in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device: found.capability,
        "get_device_name": lambda device: "A GPU",
        "mem_get_info": lambda device: (found.free, 16 << 30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr("cllm.loading.backend_choice.has_gpu", lambda config: True)
    monkeypatch.setattr("cllm.backends.torch.device.choose_operations", lambda device: None)
    return found


@pytest.fixture
def model(tmp_path: Path) -> GGUFModel:
    return GGUFModel.open(write_model(tmp_path / "tiny.gguf"))


def config_of(**changes: Any) -> Any:
    return load_config(None, {key.replace("__", "."): value for key, value in changes.items()}).config


def left_to_native(model: GGUFModel, caplog: pytest.LogCaptureFixture, **changes: Any) -> str:
    """What the log says about it."""
    with caplog.at_level(logging.WARNING, "cllm"):
        assert choose_backend(config_of(**changes), model) == "native"
    (line,) = caplog.messages
    assert "\n" not in line and line.startswith("not using the GPU: torch cannot run tiny.gguf: ")
    return line


def kv_type(name: str) -> dict[str, str]:
    return {"resources__kv_type_k": name, "resources__kv_type_v": name}


@pytest.mark.parametrize("changes", [{}, kv_type("int8"), {"backend__torch__dtype": "fp8"}])
def test_a_gpu_that_can_is_used(gpu: Gpu, model: GGUFModel, changes: dict[str, str]) -> None:
    assert choose_backend(config_of(**changes), model) == "torch"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (kv_type("q8_0"), "resources.kv_type_k is q8_0: torch supports f16, bf16"),
        (kv_type("q4_0"), "resources.kv_type_k is q4_0: torch supports f16, bf16"),
        ({"kv__window__recent": 512}, "kv.window.recent is 512, and torch has no rolling windows"),
    ],
)
def test_settings_that_only_others_have(
    gpu: Gpu, model: GGUFModel, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    assert reason in left_to_native(model, caplog, **changes)


@pytest.mark.parametrize("head_dim", [8, 24, 80])
def test_heads_that_the_kernels_do_not_take(
    gpu: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture, head_dim: int
) -> None:
    odd = GGUFModel.open(write_model(tmp_path / "tiny.gguf", head_dim=head_dim))
    assert f"its heads have {head_dim} dimensions" in left_to_native(odd, caplog)


def test_weights_that_do_not_fit(gpu: Gpu, model: GGUFModel, caplog: pytest.LogCaptureFixture) -> None:
    gpu.free = 1000
    assert "the weights of tiny.gguf take" in left_to_native(model, caplog)
    by_name = config_of(backend__type="torch")
    assert choose_backend(by_name, model) == "torch"
    with pytest.raises(ModelError, match=r"the weights of tiny take .* of the memory of cuda:0, A GPU"):
        open_torch(by_name, model, "tiny", 1, 256)


def test_a_directory_has_no_other_backend(gpu: Gpu, tmp_path: Path) -> None:
    directory = HFModel.open(save_whole(build("qwen3"), tmp_path / "tiny-qwen3"))
    gpu.free = 1000
    assert choose_backend(config_of(), directory) == "torch"
    with pytest.raises(ModelError, match="the weights of tiny take"):
        open_torch(config_of(), directory, "tiny", 1, 256)


def test_a_gpu_without_kernels(
    gpu: Gpu, model: GGUFModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: torch.device) -> None:
        raise ConfigError("the GPU's kernels need torch 2.8 or newer")

    monkeypatch.setattr("cllm.backends.torch.device.choose_operations", refuse)
    assert "the GPU's kernels need torch 2.8" in left_to_native(model, caplog)


# -- types and compute capability ----------------------------------------------------------------------------------


def test_auto_is_a_type_that_the_gpu_has(gpu: Gpu, model: GGUFModel) -> None:
    assert choose_dtype("auto", GPU) == torch.bfloat16
    gpu.capability = (7, 5)
    assert choose_dtype("auto", GPU) == torch.float16
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32
    assert choose_backend(config_of(), model) == "torch"
    with pytest.raises(
        ConfigError, match=r"dtype is bf16, which needs compute capability 8\.0, but cuda:0, A GPU has 7\.5"
    ):
        choose_dtype("bf16", GPU)


def test_fp8_needs_a_gpu_that_has_it(gpu: Gpu, model: GGUFModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(TorchBackend, "__init__", never)
    gpu.capability = (8, 0)
    for changes, setting in ((kv_type("fp8"), "kv_type_k"), ({"backend__torch__dtype": "fp8"}, "dtype")):
        with pytest.raises(ConfigError, match=rf"{setting} is fp8, which needs .* 8\.9, but .* has 8\.0"):
            open_torch(config_of(**changes), model, "tiny", 1, 256)
    gpu.capability = (8, 9)
    with pytest.raises(AssertionError, match="loaded"):
        open_torch(config_of(**kv_type("fp8")), model, "tiny", 1, 256)


# -- a first step that does not fit --------------------------------------------------------------------------------


class Failing:
    traits = BackendTraits("torch", preferred_step_tokens=8192)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def room(self, tokens: int, rows: int) -> None:
        raise self._error


@pytest.mark.parametrize("error", [BackendError("no memory"), ConfigError("no room")])
def test_a_step_that_does_not_fit_says_what_helps(error: Exception) -> None:
    backend: Any = Failing(error)
    with pytest.raises(ConfigError) as caught:
        _gpu_kv_bytes(config_of(), backend, Weights("tiny", 4 << 30), 256)
    assert str(caught.value) == (
        "the weights of tiny take 4,096 MiB of the GPU's memory, which leaves too little for a step of 8448 tokens; "
        "lower scheduler.max_step_tokens (now 8192) and scheduler.max_running (now 256), or use a smaller model or "
        "backend.torch.dtype"
    )


def test_another_failure_of_the_first_step_is_not_taken_for_that() -> None:
    backend: Any = Failing(BackendError("illegal access", fatal=True))
    with pytest.raises(BackendError, match="illegal access"):
        _gpu_kv_bytes(config_of(), backend, Weights("tiny", 4 << 30), 256)


def test_what_a_lack_of_memory_looks_like() -> None:
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
