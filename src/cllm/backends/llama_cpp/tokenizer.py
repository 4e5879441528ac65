"""llama.cpp's own tokenizer, for models whose vocabulary is of a kind that only it knows: WordPiece, unigrams."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from cllm.backends.llama_cpp.library import load_library
from cllm.backends.llama_cpp.model import load_model
from cllm.errors import InvalidRequestError
from cllm.models.gguf import GGUFModel

_LEAST_LONGEST = 256
"""Whole words that the vocabulary lacks become one token."""


class LlamaTokenizer:
    """Loads the vocabulary, and no weights."""

    def __init__(self, model: GGUFModel) -> None:
        self._library = library = load_library()
        library.take_log()
        self._model: Any = load_model(library, model.path, True, False, vocab_only=True)
        api = library.api
        self._vocab: Any = api.llama_model_get_vocab(self._model)
        self.vocab_size = model.spec.n_vocab
        tokens = model.strings("tokenizer.ggml.tokens")
        self.longest_token = max([_LEAST_LONGEST, *(len(token.encode()) for token in tokens)])
        begin: int = api.llama_vocab_bos(self._vocab)
        self.bos_id: int | None = begin if begin >= 0 else None
        self.add_bos = True
        self.eos_ids: frozenset[int] = frozenset()
        self.special_tokens: Mapping[str, int] = {}
        self.whole_tokens: Mapping[str, int] = {}
        self.infill = None

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._library.free_model(self._model)

    def encode(
        self, text: str, *, special: bool = False, add_bos: bool = True, literal: Sequence[int] = ()
    ) -> list[int]:
        """`add_bos` puts all around the text that belongs there."""
        raw = text.encode("utf-8", "replace")
        room = len(raw) + 8
        while True:
            ids = (ctypes.c_int32 * room)()
            count: int = self._library.api.llama_tokenize(self._vocab, raw, len(raw), ids, room, add_bos, special)
            if count >= 0:
                return ids[:count]
            room = -count

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(self._piece(token, not skip_special) for token in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._piece(token_id, False)

    def token_text(self, token_id: int) -> str:
        return self._piece(token_id, True).decode("utf-8", "replace")

    def _piece(self, token_id: int, special: bool) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(
                f"token id {token_id} is not in the vocabulary; ids go from 0 to {self.vocab_size - 1}"
            )
        room = 64
        while True:
            piece = ctypes.create_string_buffer(room)
            size: int = self._library.api.llama_token_to_piece(self._vocab, token_id, piece, room, 0, special)
            if size >= 0:
                return piece.raw[:size]
            room = -size
