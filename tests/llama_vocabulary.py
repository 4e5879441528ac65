"""llama.cpp's own view of a vocabulary."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp


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
