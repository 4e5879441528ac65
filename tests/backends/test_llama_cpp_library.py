"""llama.cpp out of whichever package has it: found, checked before its first call, and running what native cannot."""

from __future__ import annotations

import ctypes
import logging
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm.backends.llama_cpp import declarations, discovery, layouts, library
from cllm.backends.llama_cpp.discovery import Found, installed
from cllm.backends.llama_cpp.layouts import CONTEXT_LAYOUTS, MODEL_LAYOUTS, Field, Layout
from cllm.backends.llama_cpp.library import Library, load_library
from cllm.backends.llama_cpp.model import load_model
from cllm.engine.params import SamplingParams
from cllm.errors import ModelError
from cllm.offline import LLM
from cllm_bench.quality.llama import LlamaReference
from native_kit import Tensor, TinyModel, build_model, float_tensor, sliding_window, write_model
from repository import ROOT

HERE = list(installed())
each_library = pytest.mark.parametrize("found", HERE, ids=lambda found: found.package)


def test_one_is_installed_with_cllm() -> None:
    assert "xllamacpp" in {found.package for found in HERE}
    assert load_library().package == HERE[0].package


def test_a_compiled_one_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lib/libllama.so", "xllamacpp.abi3.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(discovery, "_folders", lambda module: [tmp_path])
    assert [found.package for found in installed()] == ["llama-cpp-python", "xllamacpp"]


@each_library
def test_params_have_the_defaults_that_a_layout_names(found: Found) -> None:
    api = Library(found).api
    params = api.llama_context_default_params()
    assert (params.n_ctx, params.n_batch, params.n_threads, params.op_offload) == (512, 2048, 4, True)
    assert api.llama_model_default_params().use_extra_bufts is True


def test_sizes_of_the_structs() -> None:
    """What llama.cpp copies, by the builds that layouts.py names, on 64-bit machines."""
    known = {layout.name: [] for layout in (*MODEL_LAYOUTS, *CONTEXT_LAYOUTS)}  # type: dict[str, list[int]]
    for layout in (*MODEL_LAYOUTS, *CONTEXT_LAYOUTS):
        declared = layout.declare()
        known[layout.name].append(declared._rest.offset)  # type: ignore[attr-defined]
        assert ctypes.sizeof(declared) == layouts._ROOM
    assert known == {"llama_model_params": [78, 70], "llama_context_params": [168, 160]}
    assert ctypes.sizeof(declarations.llama_batch) == 56


@each_library
def test_what_is_asked_for_arrives(found: Found, tmp_path: Path) -> None:
    """A field that lay elsewhere would be another one's value, or nobody's."""
    opened = Library(found)
    api = opened.api
    model = load_model(opened, write_model(tmp_path / "tiny.gguf"), mmap=False, mlock=False)
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max, params.n_threads = 1536, 96, 48, 3, 2
    params.pooling_type = api.LLAMA_POOLING_TYPE_LAST
    params.embeddings, params.kv_unified = True, False
    context = api.llama_init_from_model(model, params)
    asked = ("n_ctx", "n_ctx_seq", "n_batch", "n_ubatch", "n_seq_max", "n_threads")
    assert [getattr(api, f"llama_{name}")(context) for name in asked] == [1536, 512, 96, 48, 3, 2]
    assert api.llama_pooling_type(context) == api.LLAMA_POOLING_TYPE_LAST
    tokens = (api.llama_token * 4)(5, 6, 7, 8)
    assert api.llama_decode(context, api.llama_batch_get_one(tokens, 4)) == 0
    vector = np.ctypeslib.as_array(api.llama_get_embeddings_seq(context, 0), (api.llama_model_n_embd_out(model),))
    assert np.isfinite(vector).all() and vector.any()
    api.llama_free(context)
    api.llama_model_free(model)


# -- a library that is not as we know it ---------------------------------------------------------------------------


def one_line(error: pytest.ExceptionInfo[ModelError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def refused() -> str:
    with pytest.raises(ModelError) as caught:
        load_library.__wrapped__()
    return one_line(caught)


def test_another_layout_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Layout("llama_model_params", (Field("n_gpu_layers", ctypes.c_int32, 999),))
    monkeypatch.setattr(library, "MODEL_LAYOUTS", (other,))
    monkeypatch.setattr(library, "installed", lambda: iter(HERE[-1:]))
    line = refused()
    assert f"{HERE[-1]} has an unknown memory layout (llama_model_params.n_gpu_layers is 0, not 999)" in line
    assert "known to work: xllamacpp 2026.8.10566 to 2026.10.11549" in line and "pip install" in line


def test_a_function_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(declarations.FUNCTIONS, "llama_of_tomorrow", (None, []))
    assert "llama_of_tomorrow is missing" in refused()


def test_a_library_that_does_not_load_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libllama.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(library, "installed", lambda: iter([Found("llama-cpp-python", "0.3.99", broken)]))
    assert "llama-cpp-python 0.3.99 is installed but its library does not load" in refused()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other wheels need no such features")
def test_a_processor_that_the_wheel_is_not_for_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of an illegal instruction."""
    wheel = next(found for found in HERE if found.package == "xllamacpp")
    monkeypatch.setattr(library, "installed", lambda: iter([wheel]))
    monkeypatch.setattr(discovery, "cpu_features", lambda: frozenset({"sse4_2", "fma", "f16c"}))
    line = refused()
    assert line.startswith(f"{wheel} does not run on this processor, which has no AVX2, BMI2; compile llama.cpp")
    assert "xllamacpp>=" not in line, "the same again"
    monkeypatch.setattr(discovery, "cpu_features", frozenset)
    assert load_library.__wrapped__().package == "xllamacpp", "where features are unknown, it is tried"


def test_the_next_one_is_taken_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Found("llama-cpp-python", "0.3.99", tmp_path / "missing.so")
    monkeypatch.setattr(library, "installed", lambda: iter([broken, HERE[-1]]))
    with caplog.at_level(logging.WARNING, "cllm"):
        assert load_library.__wrapped__().package == HERE[-1].package
    (line,) = caplog.messages
    assert line.startswith("llama-cpp-python 0.3.99 ") and line.endswith(f"; using {HERE[-1]}")


def test_none_at_all_says_how_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "installed", lambda: iter(()))
    line = refused()
    assert "pip install 'xllamacpp>=2026.8.10566,<2026.11'" in line and "scripts/install.py llama-cpp" in line


def test_the_line_names_the_versions_that_are_installed_with_cllm() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    assert f'"{discovery.WHEEL};' in declared


# -- models that native does not run -------------------------------------------------------------------------------


def experts(seed: int = 3) -> TinyModel:
    """Four experts in each layer, two of them for each token."""
    model, rng = build_model(n_layers=2, n_embd=64, n_ff=96), np.random.default_rng(seed)
    changes: dict[str, Tensor | None] = {}
    for layer in range(2):
        prefix = f"blk.{layer}.ffn_"
        changes[f"{prefix}gate_inp.weight"] = float_tensor(rng.normal(0, 1.0, (4, 64)))  # decided, whatever the noise
        for name, rows, cols in (("gate", 96, 64), ("up", 96, 64), ("down", 64, 96)):
            changes[f"{prefix}{name}.weight"] = None
            changes[f"{prefix}{name}_exps.weight"] = float_tensor(rng.normal(0, 0.1, (4, rows, cols)))
    return model.with_tensors(changes).with_metadata(expert_count=4, expert_used_count=2)


@pytest.mark.parametrize(("make", "backend"), [(experts, "auto"), (sliding_window, "llama_cpp")])
def test_llama_cpp_runs_them(
    make: Callable[[], TinyModel], backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each token is one that llama.cpp on its own gives the best logit, but for the noise of its kernels."""
    path = make().write(tmp_path / "any.gguf")
    settings: dict[str, Any] = {"backend.llama_cpp.n_seq_max": 4, "resources.max_context_length": 256}
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[number + 40 for number in range(60)], [7, 8, 9], [30] * 80]
    with LLM(str(path), backend=backend, settings=settings) as llm:
        answers = llm.generate(prompts, greedy, progress=False)
    assert backend != "auto" or ("native cannot run any.gguf" in caplog.text and "using llama_cpp" in caplog.text)
    with LlamaReference(path, context=256, flash=True) as reference:
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer.token_ids) == 24
            rows = reference.logits([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
            chosen = rows[np.arange(24), answer.token_ids]
            assert (rows.max(axis=1) - chosen).max() < 0.05


def test_whatever_is_called_is_declared() -> None:
    api = load_library().api
    folder = Path(declarations.__file__).parent
    named = {name for file in folder.glob("*.py") for name in re.findall(r"\bapi\.(\w+)", file.read_text("utf-8"))}
    assert len(named) > 30 and not {name for name in named if not hasattr(api, name)}
