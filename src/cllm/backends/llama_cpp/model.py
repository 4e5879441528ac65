"""Loading a model file, and what llama.cpp says about it."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

from cllm.backends.llama_cpp.library import Library
from cllm.errors import ModelError
from cllm.models.gguf import GGUFModel
from cllm.models.spec import AttentionSpec, LayerSpec, ModelSpec, OpaqueStateSpec


def with_state_bytes(spec: ModelSpec, size: int) -> ModelSpec:
    """The same model whose states take `size` bytes or, where layers do not divide that, a few more."""
    count = sum(layer.recurrence is not None for layer in spec.layers)
    state = OpaqueStateSpec(-(-size // max(1, count)))
    layers = (replace(layer, recurrence=state if layer.recurrence else None) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def load_model(library: Library, path: Path, mmap: bool, mlock: bool, *, vocab_only: bool = False) -> Any:
    if not path.is_file():
        raise ModelError(f"there is no model file {path}")
    api = library.api
    params = api.llama_model_default_params()
    params.n_gpu_layers = 0
    params.vocab_only = vocab_only
    params.load_mode = mmap * api.LLAMA_LOAD_MODE_MMAP | mlock * api.LLAMA_LOAD_MODE_MLOCK
    library.log.clear()
    model = library.load_model(str(path).encode(), params)
    if not model:
        raise ModelError(f"llama.cpp cannot load {path}: {library.log.reason()}")
    return model


def carries_state(api: Any, model: Any) -> bool:
    """Whether layers carry a state from token to token, in place of attention or beside it."""
    return bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))


def read_spec(api: Any, model: Any, path: Path) -> ModelSpec:
    """`path`: of models that carry a state only the file says which layers do."""

    def metadata(key: str) -> str | None:
        value = ctypes.create_string_buffer(256)
        found = api.llama_model_meta_val_str(model, key.encode(), value, len(value)) >= 0
        return value.value.decode() if found else None

    architecture = metadata("general.architecture") or "unknown"
    if api.llama_model_has_encoder(model):
        raise ModelError(f"{architecture} models, which have an encoder, are not supported yet; use another model")
    if carries_state(api, model):
        return GGUFModel.open(path).spec
    n_embd, n_heads = api.llama_model_n_embd(model), api.llama_model_n_head(model)
    default_dim = n_embd // n_heads
    attention = AttentionSpec(
        n_heads=n_heads,
        n_kv_heads=api.llama_model_n_head_kv(model),
        head_dim_k=int(metadata(f"{architecture}.attention.key_length") or default_dim),
        head_dim_v=int(metadata(f"{architecture}.attention.value_length") or default_dim),
    )
    return ModelSpec(
        architecture=architecture,
        n_embd=n_embd,
        n_vocab=api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)),
        context_length=api.llama_model_n_ctx_train(model),
        layers=(LayerSpec(attention),) * api.llama_model_n_layer(model),
    )
