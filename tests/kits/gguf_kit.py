"""Small GGUF files for tests, written by the reference package `gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from cllm.models.gguf import GGUFModel, TensorFile

LLAMA_KEYS: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any] = LLAMA_KEYS,
    *,
    architecture: str = "llama",
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add_value(writer, key, value)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def tiny_model(path: Path) -> Path:
    """A file with a little of everything: numbers, strings, arrays, two tensors."""
    extra = {
        "general.name": "tiny",
        "tokenizer.ggml.tokens": ["a", "b", "ä"],
        "tokenizer.ggml.scores": [0.5, -1.0, 2.0],
    }
    tensors = {"one.weight": np.ones((4, 32), np.float32), "two.weight": np.ones((8, 32), np.float32)}
    return write_gguf(path, LLAMA_KEYS | extra, tensors=tensors)


def with_keys(path: Path, other: Path, changes: Mapping[str, Any]) -> Path:
    """A copy of a file whose tensors are all f32, with other keys; None: without one."""
    model = GGUFModel.open(path)
    with TensorFile(model) as file:
        tensors = {
            name: file.read(name).view(np.float32).reshape(info.shape[::-1]).copy()
            for name, info in model.tensors.items()
        }
    keys = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in (dict(model.metadata) | dict(changes)).items()
        if value is not None and key != "general.architecture"
    }
    return write_gguf(other, keys, architecture=model.spec.architecture, tensors=tensors)
