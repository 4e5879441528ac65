"""Small GGUF files for tests, written by the reference package `gguf`, and llama.cpp's own view of a vocabulary."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

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


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    pass


class LlamaVocabulary:
    """llama.cpp's tokenizer on the same file."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"llama.cpp does not load {path}"
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.size = llama_cpp.llama_vocab_n_tokens(self._vocab)

    def close(self) -> None:
        llama_cpp.llama_model_free(self._model)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        raw = text.encode()
        room = (llama_cpp.llama_token * (3 * len(raw) + 8))()  # a space may take three byte tokens
        count = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), room, len(room), True, special)
        assert count >= 0
        return room[:count]

    def piece(self, token_id: int) -> bytes:
        room = ctypes.create_string_buffer(512)
        count = llama_cpp.llama_token_to_piece(self._vocab, token_id, room, len(room), 0, False)
        assert count >= 0
        return room.raw[:count]

    def ends(self) -> frozenset[int]:
        return frozenset(i for i in range(self.size) if llama_cpp.llama_vocab_is_eog(self._vocab, i))
