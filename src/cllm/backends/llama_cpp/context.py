"""One `llama_context`: its life, its batch, decode, logits and abort."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.backends.base import Chunk, Logits
from cllm.backends.llama_cpp.batch import TokenBatch
from cllm.backends.llama_cpp.library import Library
from cllm.backends.llama_cpp.model import carries_state
from cllm.errors import BackendError, StepAbortedError
from cllm.kv.ops import SlotGeometry

States = NDArray[np.float32]
"""Hidden states, a row for each token."""

_NO_ROOM, _ABORTED, _REFUSED = 1, 2, -1  # what llama_decode returns; below _REFUSED the context is broken


class Context:
    """Owns the context and everything whose life is bound to it. `open` and `close` may be called again and again."""

    def __init__(
        self, library: Library, model: Any, params: Any, geometry: SlotGeometry, n_vocab: int, most_drafts: int = 0
    ) -> None:
        """`most_drafts`: rows of logits that a step may want besides one per slot."""
        self.library = library
        self.slots = 0
        self._most_drafts = most_drafts
        self._first_slots = geometry.first
        self._asked_tokens = geometry.slot_tokens
        self._model = model
        self.window: int = library.api.llama_model_n_swa(model)
        """How many positions a layer with a sliding window attends to; 0: there are none."""
        self.carries_state = carries_state(library.api, model)
        self._params = params
        self._n_vocab = n_vocab
        self._pointer: Any = None
        self._abort_callback = library.native_abort_callback()
        self._abort_data = ctypes.create_string_buffer(2)  # a C string: "" = go on, "x" = abort
        self.open()

    def open(self, slots: int | None = None) -> None:
        """Open with `slots` slots, or as many as at the start. If it fails, it may be tried with another number."""
        library, api, params = self.library, self.library.api, self._params
        self.slots = self._first_slots if slots is None else slots
        params.n_ctx = self.slots * self._asked_tokens
        params.n_seq_max = self.slots
        params.n_outputs_max = self.most_rows
        library.log.clear()
        self._pointer = library.new_context(self._model, self._params)
        if not self._pointer:
            raise BackendError(
                f"llama.cpp made no context for {self.slots} sequences and {self._params.n_ctx} tokens: "
                f"{library.log.reason()}",
                fatal=True,
            )
        self._memory = library.get_memory(self._pointer)
        self.slot_tokens: int = api.llama_n_ctx_seq(self._pointer)
        self.n_batch: int = api.llama_n_batch(self._pointer)
        self.n_ubatch: int = api.llama_n_ubatch(self._pointer)
        self._batch = TokenBatch(library, self.n_batch, self.slot_tokens + 1)
        self._logits_address = 0
        self._logits = np.empty((0, self._n_vocab), np.float32)
        self._watch_abort(True)

    @property
    def most_rows(self) -> int:
        """Rows of logits that a step may want."""
        return self.slots + self._most_drafts

    def close(self) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer:
            self.library.free_context(pointer)

    @property
    def pointer(self) -> Any:
        if not self._pointer:
            raise BackendError("the llama.cpp context is closed", fatal=True)
        return self._pointer

    @property
    def memory(self) -> Any:
        """The handle of the K/V memory."""
        return self.pointer and self._memory

    def abort(self) -> None:
        """Not where layers carry a state: half a step would leave it in doubt, that of other sequences, too, which a
        step may move."""
        if self.carries_state:
            return
        self._abort_data[0] = b"x"

    def clear_abort(self) -> None:
        self._abort_data[0] = b"\0"

    def decode(self, chunks: Sequence[Chunk]) -> Logits:
        """Compute at most `n_batch` tokens; the rows of logits that the chunks want, in order.

        The rows are llama.cpp's own memory.
        """
        rows = self._batch.fill(chunks)
        self.library.log.clear()
        code: int = self.library.decode(self.pointer, self._batch.struct)
        if code:
            raise self._failure(code)
        return self._view(rows)

    @contextmanager
    def embedding(self) -> Iterator[None]:
        """Inside, `decode` leaves hidden states; its logits are undefined."""
        api = self.library.api
        api.llama_set_embeddings(self.pointer, True)
        try:
            yield
        finally:
            api.llama_set_embeddings(self.pointer, False)

    def states(self, rows: int, size: int) -> States:
        """The hidden states of the tokens that were decoded last."""
        found = self.library.api.llama_get_embeddings(self.pointer)
        if not found:
            raise BackendError("llama.cpp returned no hidden states")
        states: States = np.ctypeslib.as_array(found, (rows, size)).copy()
        return states

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Around work that an abort must not leave half done."""
        self._watch_abort(False)
        try:
            yield
        finally:
            self._watch_abort(True)

    def _watch_abort(self, watch: bool) -> None:
        api = self.library.api
        callback, data = (self._abort_callback, self._abort_data) if watch else (api.ggml_abort_callback(), None)
        api.llama_set_abort_callback(self.pointer, callback, data)

    def _failure(self, code: int) -> BackendError:
        tokens = self._batch.struct.n_tokens
        if code == _ABORTED:
            return StepAbortedError("the step was aborted")
        if code == _NO_ROOM:
            return BackendError(f"llama.cpp has no room for a batch of {tokens} tokens")
        if code == _REFUSED:
            return BackendError(f"llama.cpp refused a batch of {tokens} tokens: {self.library.log.reason()}")
        reason = self.library.log.reason()
        return BackendError(f"llama_decode failed with {code} on {tokens} tokens: {reason}", fatal=True)

    def _view(self, rows: int) -> Logits:
        # llama.cpp keeps room for one row per sequence from the start, and for more once they were wanted; so this
        # address hardly ever changes.
        address: int = self.library.get_logits(self.pointer)
        if address != self._logits_address or rows > len(self._logits):
            size = max(rows, self.slots)
            buffer = (ctypes.c_float * (size * self._n_vocab)).from_address(address)
            self._logits = np.ctypeslib.as_array(buffer).reshape(size, self._n_vocab)
            self._logits_address = address
        return self._logits[:rows]
