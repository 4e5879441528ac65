"""llama.cpp as the reference for logits: the same file, all positions at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from cllm.backends.llama_cpp.library import load_library
from cllm.backends.llama_cpp.model import load_model

Floats = NDArray[np.float32]


class LlamaReference:
    """One model in llama.cpp, f16 K/V, no flash attention: of its ways to compute, the one that rounds least.

    (Flash attention on a CPU sums the weighted values in f16.) Use as a context manager.
    """

    def __init__(self, path: Path, *, context: int, threads: int = 2) -> None:
        library = load_library()
        self._model = load_model(library, path, mmap=True, mlock=False)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = context
        params.n_ubatch = min(context, 512)
        params.n_seq_max = 1
        params.n_outputs_max = context
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F16
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.offload_kqv = params.op_offload = False
        library.log.clear()
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, f"llama.cpp makes no context for {path}: {library.log.reason()}"
        self._batch = llama_cpp.llama_batch_init(context, 0, 1)

    def __enter__(self) -> LlamaReference:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def tokenise(self, text: str) -> list[int]:
        raw = text.encode()
        room = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), room, len(room), True, False)
        assert count >= 0
        return list(room[:count])

    def logits(self, tokens: Sequence[int]) -> Floats:
        """A row for every position of a sequence that holds nothing but these tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = 1
        code = llama_cpp.llama_decode(self._context, batch)
        assert code == 0, f"llama_decode says {code}"
        first = ctypes.cast(llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        rows: Floats = np.ctypeslib.as_array(first, shape=(len(tokens), self.n_vocab))
        return np.array(rows)  # a copy: llama.cpp writes the next call's rows into the same memory
