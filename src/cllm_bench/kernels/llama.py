"""llama.cpp through its C API, set up as it runs best."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from cllm.backends.base import Chunk
from cllm.backends.llama_cpp.context import Context
from cllm.backends.llama_cpp.library import load_library
from cllm.backends.llama_cpp.model import load_model
from cllm.backends.llama_cpp.slots import LlamaSlotOps
from cllm.kv.ops import SavedKV, SlotGeometry
from cllm.models.gguf import GGUFModel
from cllm_bench.kernels.streams import Tokens, fill, tokens_per_s
from cllm_bench.kernels.works import Work

BATCH = 2048
MICRO_BATCH = 512
PADDING = 256


class SequenceStreams:
    """Streams as sequences of one context."""

    def __init__(self, context: Context, streams: int, *, states: bool = False) -> None:
        """`states`: the model carries some, which cannot go back: they are saved and loaded again."""
        self._context = context
        self._ops = LlamaSlotOps(context)
        self._slots = range(streams)
        self._states = states
        self._filled: SavedKV | None = None

    def prompt(self, tokens: Tokens[int]) -> None:
        self._ops.remove(0, 0)
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            self._context.decode([Chunk(part, start, start + len(part) == len(tokens), 0)])

    def share(self) -> None:
        for slot in self._slots[1:]:
            self._ops.copy(0, slot)
        self._filled = self._ops.save(0) if self._states else None

    def decode(self, tokens: Tokens[int], position: int) -> None:
        self._context.decode([Chunk(tokens[slot : slot + 1], position, True, slot) for slot in self._slots])

    def advance(self, tokens: Tokens[int], position: int) -> None:
        self._context.decode([Chunk(tokens, position, len(tokens), 0)])

    def rewind(self, position: int) -> None:
        for slot in self._slots:
            self._ops.remove(slot, 0 if self._filled is not None else position)
            if self._filled is not None:
                self._ops.load(slot, self._filled)


class LlamaEngine:
    def __init__(self, *, model: str, threads: int) -> None:
        self._library = load_library()
        self._model = load_model(self._library, Path(model), mmap=True, mlock=False)
        spec = GGUFModel.open(Path(model)).spec
        self.n_vocab, self._recurrent = spec.n_vocab, spec.recurrent
        self._threads = threads
        self._contexts: dict[tuple[Work, bool], tuple[Context, SequenceStreams]] = {}

    def describe(self) -> dict[str, Any]:
        return {"built_for": self._library.cpu_feature(), "version": self._library.version}

    def speed(self, work: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, float]:
        todo = Work(**work)
        streams = self._streams_for(todo, **variant)
        return {"tokens_per_s": tokens_per_s(streams, todo, self.n_vocab)}

    async def answer(self, prompt: Tokens[int], count: int) -> float:
        """What a token of a greedy answer takes, in ms. A context of its own, which is kept."""
        work = Work("answer", "one answer", streams=1, context=len(prompt) + count)
        if (work, True) not in self._contexts:
            context = self._open(-(-work.context // PADDING) * PADDING, 1, flash=True)
            self._contexts[work, True] = context, SequenceStreams(context, 1)
        context, streams = self._contexts[work, True]
        streams.rewind(0)
        times, tokens = list[float](), prompt
        for position in (0, *range(len(prompt), len(prompt) + count - 1)):
            logits = context.decode([Chunk(tokens, position, 1, 0)])
            tokens = array("i", [int(logits[0].argmax())])
            times.append(perf_counter())
        return token_ms(times)

    def forget(self) -> dict[str, Any]:
        """Close all contexts; the next work makes new ones."""
        for context, _ in self._contexts.values():
            context.close()
        self._contexts.clear()
        return {}

    def _streams_for(self, work: Work, *, flash: bool) -> SequenceStreams:
        key = (work, flash)
        if key not in self._contexts:
            room = -(-work.room // PADDING) * PADDING
            sequences = max(work.streams, work.rows)  # as many rows of logits as a context has sequences
            context = self._open(sequences * room, sequences, flash=flash)
            streams = SequenceStreams(context, work.streams, states=self._recurrent)
            if work.steps:
                fill(streams, work, self.n_vocab)
            self._contexts[key] = (context, streams)
        return self._contexts[key][1]

    def _open(self, tokens: int, sequences: int, *, flash: bool) -> Context:
        api = self._library.api
        params = api.llama_context_default_params()
        params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.offload_kqv = params.op_offload = False
        params.no_perf = True
        geometry = SlotGeometry(sequences, -(-tokens // sequences))
        return Context(self._library, self._model, params, geometry, self.n_vocab)


def token_ms(times: Sequence[float]) -> float:
    """Between the first token and the last."""
    return 1e3 * (times[-1] - times[0]) / (len(times) - 1)
