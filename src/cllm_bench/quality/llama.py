"""llama.cpp's logits of every position of a text."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from cllm.backends.llama_cpp.library import load_library
from cllm.backends.llama_cpp.model import load_model
from cllm.errors import BackendError

Floats = NDArray[np.float32]

MICRO_BATCH = 512


class LlamaReference:
    """One model in llama.cpp. Use as a context manager.

    Without flash attention and with f16 K/V it rounds least of all its ways to compute: flash attention on a CPU sums
    the weighted values in f16. Values of a quantised type need it, though.
    """

    def __init__(
        self, path: Path, *, context: int, threads: int = 2, kv_type: str = "f16", flash: bool = False
    ) -> None:
        self._library = library = load_library()
        self._api = api = library.api
        self._model = load_model(library, path, mmap=True, mlock=False)
        self.n_vocab: int = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_outputs_max = context
        params.n_ubatch = min(context, MICRO_BATCH)
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = getattr(api, f"GGML_TYPE_{kv_type.upper()}")
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.offload_kqv = params.op_offload = False
        library.log.clear()
        self._context = library.new_context(self._model, params)
        if not self._context:
            library.free_model(self._model)
            raise BackendError(f"llama.cpp makes no context for {path}: {library.log.reason()}", fatal=True)
        self._batch = api.llama_batch_init(context, 0, 1)

    def __enter__(self) -> LlamaReference:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._api.llama_batch_free(self._batch)
        self._library.free_context(self._context)
        self._library.free_model(self._model)

    def logits(self, tokens: Sequence[int]) -> Floats:
        """A row for every position of a sequence that holds nothing but these tokens."""
        api, batch = self._api, self._batch
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = 1
        code = self._library.decode(self._context, batch)
        if code:
            raise BackendError(f"llama_decode failed with {code} on {len(tokens)} tokens", fatal=True)
        first = ctypes.cast(api.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        rows: Floats = np.ctypeslib.as_array(first, shape=(len(tokens), self.n_vocab))
        return np.array(rows)  # a copy: llama.cpp writes the next call's rows into the same memory
