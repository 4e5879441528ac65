"""Loading a model file, and what llama.cpp says about it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from cllm.backends.llama_cpp.library import Library
from cllm.errors import ModelError
from cllm.models.spec import AttentionSpec, LayerSpec, ModelSpec


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


def read_spec(api: Any, model: Any) -> ModelSpec:
    def metadata(key: str) -> str | None:
        value = ctypes.create_string_buffer(256)
        found = api.llama_model_meta_val_str(model, key.encode(), value, len(value)) >= 0
        return value.value.decode() if found else None

    architecture = metadata("general.architecture") or "unknown"
    if api.llama_model_has_encoder(model) or api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model):
        raise ModelError(
            f"{architecture} models, which are no decoders with attention in every layer, are not supported yet; use "
            "another model"
        )
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
