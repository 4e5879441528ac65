"""Models that only embed texts or rank documents, over llama.cpp: BERT and its kin, and rerankers.

Every token sees all others, so a text is computed in one piece, and nothing of it is of use to another text: there is
no K/V memory. Several texts are computed together, each as a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.backends.base import Backend, BackendTraits, Chunk, Hidden, Pooling, StepResult
from cllm.backends.llama_cpp.batch import TokenBatch
from cllm.backends.llama_cpp.library import load_library
from cllm.backends.llama_cpp.model import load_model, read_spec
from cllm.errors import BackendError, ModelError
from cllm.kv.ops import Geometry, Move
from cllm.models.gguf import GGUFModel

_TOGETHER = 64
"""Most texts in one pass."""


class LlamaCppEncoder(Backend):
    traits = BackendTraits("llama_cpp", pooling="cls", frees_windows=False)

    def __init__(self, model: GGUFModel, *, threads: int, n_batch: int, mmap: bool, mlock: bool) -> None:
        self._context: Any = None
        self._model: Any = None
        self._threads = threads
        self._geometry: Geometry | None = None
        what = "ranks documents: use POST /v1/rerank" if model.ranks else "embeds texts: use POST /v1/embeddings"
        self._no_answers = f"{model.path.name} generates no text, it only {what}"
        self._pools = model.get(f"{model.spec.architecture}.pooling_type", 0) != 0
        self._library = load_library()
        self._library.take_log()
        self._model = load_model(self._library, model.path, mmap, mlock)
        try:
            api = self._library.api
            self.spec = read_spec(api, self._model, model.path)
            if hasattr(api, "llama_model_n_embd_out"):  # some models project what they have at the end
                self.spec = replace(self.spec, n_embd=api.llama_model_n_embd_out(self._model))
            self._n_batch = most = min(n_batch, self.spec.context_length)
            self.traits = replace(
                self.traits,
                ranks=model.ranks,
                no_answers=self._no_answers,
                context_cap=most,
                preferred_step_tokens=most,
            )
            self._outputs = api.llama_model_n_cls_out(self._model) if model.ranks else self.spec.n_embd
            self._open()
        except (ModelError, BackendError):
            self.close()
            raise

    def _open(self) -> None:
        library, api = self._library, self._library.api
        params = api.llama_context_default_params()
        params.embeddings = True
        params.kv_unified = True
        params.n_ctx = params.n_batch = params.n_ubatch = self._n_batch
        params.n_seq_max = min(_TOGETHER, self._n_batch)
        if hasattr(params, "n_outputs_max"):
            params.n_outputs_max = self._n_batch
        params.n_threads = params.n_threads_batch = self._threads
        params.offload_kqv = params.op_offload = False
        params.no_perf = True
        if not self._pools:
            params.pooling_type = api.LLAMA_POOLING_TYPE_MEAN
        library.log.clear()
        self._context = library.new_context(self._model, params)
        if not self._context:
            raise BackendError(
                f"llama.cpp made no context for {self._n_batch} tokens: {library.log.reason()}", fatal=True
            )
        self._batch = TokenBatch(library, self._n_batch, self._n_batch)

    def allocate(self, geometry: Geometry) -> None:
        self._geometry = geometry

    @property
    def kv_bytes(self) -> int:
        return 0

    @property
    def ops(self) -> _NoMemory:
        return _NoMemory()

    def collect(self, chunks: Sequence[Chunk]) -> StepResult:
        self._check(chunks)
        read: dict[int, Any] = {}
        for batch in self._batches(chunks):
            read.update(self._compute(batch, chunks))
        return StepResult(np.empty((0, self.spec.n_vocab), np.float32), None, read)

    def _check(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if not isinstance(chunk.asks, Pooling):
                raise BackendError(self._no_answers)
            if chunk.start or len(chunk.tokens) > self._n_batch:
                raise BackendError(f"a text must be computed in one step of at most {self._n_batch} tokens")

    def _batches(self, chunks: Sequence[Chunk]) -> Iterator[list[int]]:
        """Numbers of chunks that are computed together."""
        batch: list[int] = []
        room = self._n_batch
        for index, chunk in enumerate(chunks):
            if len(chunk.tokens) > room or len(batch) == min(_TOGETHER, self._n_batch):
                yield batch
                batch, room = [], self._n_batch
            batch.append(index)
            room -= len(chunk.tokens)
        if batch:
            yield batch

    def _compute(self, batch: list[int], chunks: Sequence[Chunk]) -> dict[int, Hidden]:
        library, context = self._library, self._live()
        texts = [Chunk(chunks[index].tokens, 0, len(chunks[index].tokens), slot) for slot, index in enumerate(batch)]
        memory = library.get_memory(context)
        if memory:
            library.api.llama_memory_clear(memory, True)
        self._batch.fill(texts)
        library.log.clear()
        code: int = library.decode(context, self._batch.struct)
        if code:
            tokens = self._batch.struct.n_tokens
            raise BackendError(f"llama.cpp failed with {code} on {tokens} tokens: {library.log.reason()}")
        return {index: self._pooled(context, slot) for slot, index in enumerate(batch)}

    def _pooled(self, context: Any, slot: int) -> Hidden:
        size = self._outputs
        found = self._library.api.llama_get_embeddings_seq(context, slot)
        if not found:
            raise BackendError("llama.cpp returned no embedding for a text")
        values: NDArray[np.float32] = np.ctypeslib.as_array(found, (size,))
        if self.traits.ranks and size == 1:  # a logit; of several classes they are probabilities already
            return 1.0 / (1.0 + np.exp(-values.astype(np.float64)))
        return values.astype(np.float64)

    def abort(self) -> None:
        """Steps are short."""

    def rebuild(self) -> None:
        context, self._context = self._live(), None
        self._library.free_context(context)
        self._open()

    def close(self) -> None:
        context, self._context = self._context, None
        if context:
            self._library.free_context(context)
        model, self._model = self._model, None
        if model:
            self._library.free_model(model)

    def describe(self) -> str:
        threads = "1 thread" if self._threads == 1 else f"{self._threads} threads"
        work = "ranks documents" if self.traits.ranks else "embeds texts"
        return f"llama.cpp ({self._library.package} {self._library.version}, {threads}), {work}"

    def _live(self) -> Any:
        if not self._context:
            raise BackendError("the llama.cpp context is closed", fatal=True)
        return self._context


class _NoMemory:
    """Operations on blocks that hold nothing."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def move_blocks(self, moves: Sequence[Move]) -> None: ...

    def release_pages(self, first: int, count: int) -> None: ...

    def prepare_pages(self, first: int, count: int) -> None: ...

    def resident_bytes(self) -> int:
        return 0
