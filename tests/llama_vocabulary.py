"""llama.cpp's own view of a vocabulary."""

from __future__ import annotations

import ctypes
from pathlib import Path

from cllm.backends.llama_cpp.library import load_library


class LlamaVocabulary:
    """llama.cpp's tokenizer on the same file."""

    def __init__(self, path: Path) -> None:
        library = load_library()
        library.take_log()
        self._api = library.api
        params = self._api.llama_model_default_params()
        params.vocab_only = True
        self._model = self._api.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"llama.cpp does not load {path}"
        self._vocab = self._api.llama_model_get_vocab(self._model)
        self.size = self._api.llama_vocab_n_tokens(self._vocab)

    def close(self) -> None:
        self._api.llama_model_free(self._model)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        raw = text.encode()
        room = (self._api.llama_token * (3 * len(raw) + 8))()  # a space may take three byte tokens
        count = self._api.llama_tokenize(self._vocab, raw, len(raw), room, len(room), True, special)
        assert count >= 0
        return room[:count]

    def piece(self, token_id: int) -> bytes:
        room = ctypes.create_string_buffer(512)
        count = self._api.llama_token_to_piece(self._vocab, token_id, room, len(room), 0, False)
        assert count >= 0
        return room.raw[:count]

    def ends(self) -> frozenset[int]:
        return frozenset(i for i in range(self.size) if self._api.llama_vocab_is_eog(self._vocab, i))
