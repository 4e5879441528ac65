"""Chooses the backend for a model, before its weights are loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from cllm.config import Config
from cllm.errors import ModelError
from cllm.loading.resources import Weights
from cllm.loading.torch_model import Model, asks_for_gpu, gpu_refusal, has_gpu, torch_refusal, torch_weights
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_decoder import decoder_spec
from cllm.models.hf_directory import HFModel
from cllm.models.registry import resolve

log = logging.getLogger("cllm")


def open_model_file(config: Config) -> Model:
    """Reads the model's header, not its weights."""
    path = resolve(config.model.name)
    return HFModel.open(path) if path.is_dir() else GGUFModel.open(path)


def name_of(config: Config, model: Model) -> str:
    """The model's name, unless the configuration has an alias."""
    asked = config.model.name
    if isinstance(model, HFModel):
        return asked.rpartition("/")[2] if asked.startswith("hf:") else model.name
    return model.path.stem if Path(asked).suffix or asked.startswith("hf:") else asked


def choose_backend(config: Config, model: Model) -> Literal["native", "llama_cpp", "torch"]:
    """The configured backend; with auto, torch for Hugging Face directories or on a GPU, else native, else
    llama_cpp."""
    asked = config.backend.type
    if isinstance(model, HFModel) and asked not in ("auto", "torch"):
        raise ModelError(
            f"{asked} cannot run {model.name}: it is a Hugging Face directory; use --backend torch, or a .gguf file"
        )
    must = asked == "torch" or (asked == "auto" and asks_for_gpu(config))
    if isinstance(model, HFModel) or must or (asked == "auto" and has_gpu(config)):
        by_choice = not (must or isinstance(model, HFModel))
        refusal = torch_refusal(model) or (gpu_refusal(config, model) if by_choice else None)
        if refusal is None:
            return "torch"
        if isinstance(model, HFModel):
            raise ModelError(f"torch cannot run {model.name}: {refusal}")
        if must:
            raise ModelError(f"torch cannot run {model.path.name}: {refusal}; use --backend auto and --device auto")
        log.warning("not using the GPU: torch cannot run %s: %s", model.path.name, refusal)
    assert isinstance(model, GGUFModel)
    return _choose_for_cpu(config, model)


def _choose_for_cpu(config: Config, model: GGUFModel) -> Literal["native", "llama_cpp"]:
    if config.backend.type == "llama_cpp":
        return "llama_cpp"
    refusal = _native_refusal(model)
    if refusal is None and config.kv.window.recent is not None and _has_windows(model):
        refusal = "kv.window.recent is set, but some of its layers have a sliding window of their own"
    if refusal is None:
        return "native"
    if config.backend.type == "native":
        raise ModelError(f"native cannot run {model.path.name}: {refusal}; use --backend llama_cpp")
    _check_llama_cpp_installed(f"native cannot run {model.path.name}: {refusal}")
    log.warning("native cannot run %s: %s; using llama_cpp", model.path.name, refusal)
    return "llama_cpp"


def weights_of(config: Config, model: Model, kind: str) -> Weights:
    if kind == "torch" or isinstance(model, HFModel):
        return torch_weights(config, model, name_of(config, model))
    if kind == "native":
        from cllm.backends.native.sizes import packed_bytes

        return Weights(model.path.name, packed_bytes(model))
    settings = config.backend.llama_cpp
    return Weights(model.path.name, model.size_bytes, mapped=settings.mmap and not settings.mlock)


def _native_refusal(model: GGUFModel) -> str | None:
    """Why the native engine cannot run the model, or None."""
    from cllm.backends.native import unsupported

    return unsupported(model)


def _has_windows(model: GGUFModel) -> bool:
    return any(attention.window for attention in decoder_spec(model).attentions)


def _check_llama_cpp_installed(otherwise: str) -> None:
    from cllm.backends.llama_cpp.library import load_library

    try:
        load_library()
    except ModelError as error:
        raise ModelError(f"{otherwise}; and {error}") from error
