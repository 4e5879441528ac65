"""Small random models whose layers carry a state, of every kind that llama.cpp knows.

llama.cpp itself says which tensors a model of such sizes has; we fill them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_ubyte, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cllm.backends.llama_cpp.library import load_library
from gguf_kit import write_gguf
from native_kit import vocabulary_keys

VOCABULARY = 320
_BASE: dict[str, Any] = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 4,
    "feed_forward_length": 96,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "rope.dimension_count": 32,
}
_SSM: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 32,
    "ssm.time_step_rank": 2,
    "ssm.group_count": 2,
}
_WIDE = _SSM | {"ssm.inner_size": 128}
_EXPERTS: dict[str, Any] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
}
_DELTA = _SSM | {"rope.dimension_sections": [4, 4, 4, 4], "full_attention_interval": 4}
_THIRD = {"attention.head_count_kv": [0, 0, 1, 0]}
_WITHOUT = {"attention.head_count": 0, "attention.head_count_kv": 0}
_RWKV = {"wkv.head_size": 32, "time_mix_extra_dim": 16, "time_decay_extra_dim": 16, "rescale_every_n_layers": 0}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen35": _DELTA,
    "qwen35moe": _DELTA | _EXPERTS,
    "qwen3next": _DELTA | _EXPERTS,
    "lfm2": _THIRD | {"shortconv.l_cache": 3},
    "lfm2moe": _THIRD | _EXPERTS | {"shortconv.l_cache": 3, "leading_dense_block_count": 1, "expert_gating_func": 2},
    "granitehybrid": _WIDE | _THIRD,
    "nemotron_h": _WIDE | {"attention.head_count_kv": [0, 1, 0, 0], "feed_forward_length": [0, 0, 0, 96]},
    "falcon-h1": _WIDE,
    "jamba": _WIDE | _THIRD | {"ssm.group_count": 0, "ssm.time_step_rank": 8, "attention.head_count": [2, 2, 2, 2]},
    "plamo2": {
        "embedding_length": 128, "block_count": 2, "attention.head_count": [2, 0], "attention.head_count_kv": [2, 0],
        "attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64,
        "ssm.conv_kernel": 4, "ssm.inner_size": 256, "ssm.state_size": 64, "ssm.time_step_rank": 2,
        "ssm.group_count": 0,
    },
    "mamba": _WITHOUT | _WIDE | {"ssm.time_step_rank": 8, "ssm.group_count": 0},
    "mamba2": _WITHOUT | _WIDE,
    "rwkv6": _WITHOUT | _RWKV,
    "rwkv7": _WITHOUT | _RWKV | {
        "attention.decay_lora_rank": 16, "attention.iclr_lora_rank": 16,
        "attention.value_residual_mix_lora_rank": 16, "attention.gate_lora_rank": 16,
    },
}  # fmt: skip
"""What a model of each architecture states beside the sizes above."""


class _Params(ctypes.Structure):
    _fields_ = (("room", c_ubyte * 512),)


class _Tensor(ctypes.Structure):
    """The beginning of a `ggml_tensor`."""

    _fields_ = (("type", c_int), ("buffer", c_void_p), ("sizes", c_int64 * 4))


_OnTensor = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)


def write_states_model(path: Path, architecture: str, seed: int = 0, *, lacks: str = "scale$", **changes: Any) -> Path:
    """`lacks`: in names of optional tensors that are left out. `changes`: of its sizes, without the architecture's
    name; __ for a dot."""
    shape = _BASE | SHAPES[architecture] | {key.replace("__", "."): value for key, value in changes.items()}
    keys = {f"{architecture}.{key}": value for key, value in shape.items()}
    rng = np.random.default_rng(seed)
    tensors = {
        name: _values(rng, name, sizes)
        for name, sizes in _tensors(architecture, keys).items()
        if not re.search(lacks, name)
    }
    return write_gguf(path, keys | vocabulary_keys(VOCABULARY), architecture=architecture, tensors=tensors)


def _values(rng: np.random.Generator, name: str, sizes: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Such that activations keep a size of about 1."""
    noise = rng.normal(0.0, 1.0, sizes)
    if "norm" in name and name.endswith("weight"):
        values = 1.0 + 0.1 * noise
    elif name.endswith("ssm_a"):
        values = -np.exp(0.3 * noise - 1.0)  # states fade
    elif name.startswith("token_embd"):
        values = noise
    elif name.startswith("output."):
        values = noise * 4.0 * sizes[-1] ** -0.5
    elif len(sizes) > 1 and name.endswith("weight"):
        values = noise * sizes[-1] ** -0.5
    else:
        values = 0.1 * noise
    return values.astype(np.float32)


def _tensors(architecture: str, keys: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a model with these keys, with the sizes that numpy would give, the row's last."""
    library = _library()
    header = library.gguf_init_empty()
    _set(header, "general.architecture", architecture)
    _set(header, "tokenizer.ggml.model", "no_vocab")
    _set(header, f"{architecture}.vocab_size", VOCABULARY)
    for key, value in keys.items():
        _set(header, key, value)
    found: dict[str, tuple[int, ...]] = {}

    def note(tensor: int, _data: object) -> None:
        sizes = tuple(ctypes.cast(tensor, POINTER(_Tensor)).contents.sizes)
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes = sizes[:-1]
        found[library.ggml_get_name(tensor).decode()] = sizes[::-1]

    log = load_library().log
    log.clear()
    model = library.llama_model_init_from_user(header, _OnTensor(note), None, library.llama_model_default_params())
    assert model, f"{architecture}: {log.reason()}"
    library.llama_model_free(model)
    return found


def _set(header: int, key: str, value: Any) -> None:
    library, name = _library(), key.encode()
    if isinstance(value, str):
        library.gguf_set_val_str(header, name, value.encode())
    elif isinstance(value, bool):
        library.gguf_set_val_bool(header, name, value)
    elif isinstance(value, float):
        library.gguf_set_val_f32(header, name, value)
    elif isinstance(value, int):
        library.gguf_set_val_u32(header, name, value)
    else:
        library.gguf_set_arr_data(header, name, _UINT32, (c_uint32 * len(value))(*value), len(value))


_UINT32 = 4


@cache
def _library() -> Any:
    """A binding of its own for what only tests call."""
    library = ctypes.CDLL(load_library().api.library._name)
    library.llama_model_default_params.restype = _Params
    library.gguf_init_empty.restype = c_void_p
    for kind, of in (("u32", c_uint32), ("f32", c_float), ("str", c_char_p), ("bool", c_bool)):
        getattr(library, f"gguf_set_val_{kind}").argtypes = [c_void_p, c_char_p, of]
    library.gguf_set_arr_data.argtypes = [c_void_p, c_char_p, c_int, c_void_p, c_size_t]
    library.llama_model_init_from_user.restype = c_void_p
    library.llama_model_init_from_user.argtypes = [c_void_p, _OnTensor, c_void_p, _Params]
    library.llama_model_free.argtypes = [c_void_p]
    library.ggml_get_name.restype, library.ggml_get_name.argtypes = c_char_p, [c_void_p]
    return library
