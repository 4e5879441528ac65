"""cLLM's engine: the extension, fed directly, without scheduler and cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil

from cllm.backends.native.loader import load_engine
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_decoder import decoder_spec
from cllm_bench.kernels.blocks import BLOCK, KV_TYPE, BlockStreams
from cllm_bench.kernels.limits import machine_limits
from cllm_bench.kernels.streams import draw_tokens, fill, tokens_per_s
from cllm_bench.kernels.works import Work

FIRST_PROMPT = 16


class NativeEngine:
    def __init__(self, *, model: str, threads: int, instruction_set: str) -> None:
        self._started = perf_counter()
        self._model = GGUFModel.open(Path(model))
        self._engine = load_engine(self._model, threads=threads, instruction_set=instruction_set)
        self._spec = decoder_spec(self._model)
        self._filled: tuple[Work, BlockStreams] | None = None

    def describe(self) -> dict[str, Any]:
        return {"instruction_set": self._engine.instruction_set, "weight_bytes": self._engine.weight_bytes}

    def first_token(self) -> dict[str, float]:
        """Seconds from the constructor to the first token of a short prompt."""
        streams = self._open(1, FIRST_PROMPT)
        streams.prompt(draw_tokens(FIRST_PROMPT, "first", self._spec.n_vocab))
        return {"seconds": perf_counter() - self._started}

    def speed(self, work: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, float]:
        todo = Work(**work)
        return {"tokens_per_s": tokens_per_s(self._streams_for(todo), todo, self._spec.n_vocab)}

    def forget(self) -> dict[str, Any]:
        self._filled = None
        return {}

    def limits(self, seconds: float) -> dict[str, float]:
        return machine_limits(self._engine, seconds)

    def memory(self, work: Mapping[str, Any]) -> dict[str, float]:
        """What the whole process has in memory after the work, and what it must have."""
        todo = Work(**work)
        streams = self._streams_for(todo)
        tokens_per_s(streams, todo, self._spec.n_vocab)
        per_token = self._spec.kv_bytes_per_token(KV_TYPE, KV_TYPE)
        return {
            "resident_bytes": psutil.Process().memory_info().rss,
            "weight_bytes": self._engine.weight_bytes,
            "kv_bytes": streams.tokens_used * per_token,
        }

    def profile(self, work: Mapping[str, Any]) -> dict[str, float]:
        """Seconds of one pass by phase."""
        todo = Work(**work)
        streams = self._streams_for(todo)
        self._engine.set_profiling(True)
        tokens_per_s(streams, todo, self._spec.n_vocab)
        phases = self._engine.profile()
        self._engine.set_profiling(False)
        return phases

    def _streams_for(self, work: Work) -> BlockStreams:
        """Filled streams; those of the work before are given up."""
        if self._filled is None or self._filled[0] != work:
            streams = self._open(work.streams, work.room)
            if work.steps:
                fill(streams, work, self._spec.n_vocab)
            self._filled = (work, streams)
        return self._filled[1]

    def _open(self, streams: int, room: int) -> BlockStreams:
        layout = self._spec.kv_layout(KV_TYPE, KV_TYPE, BLOCK, apart=False)
        return BlockStreams(self._engine, self._spec.n_vocab, streams, room, layout=layout)
