"""OpenVINO GenAI's continuous batching, stepped by hand so that generating is timed apart from the prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai

from cllm.errors import BackendError, ModelError
from cllm.models.gguf import GGUFModel
from cllm_bench.kernels.streams import draw_tokens
from cllm_bench.kernels.works import Work

CACHE_GB = 2
BATCHED_TOKENS = 2048
MAX_STREAMS = 256


class GenaiEngine:
    def __init__(self, *, model: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = BATCHED_TOKENS
        scheduler.max_num_seqs = MAX_STREAMS
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads}
        try:
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        except RuntimeError as error:
            raise ModelError(f"OpenVINO GenAI cannot load {model}: {str(error).strip().splitlines()[-1]}") from error
        self._n_vocab = GGUFModel.open(Path(model)).spec.n_vocab
        self._requests = 0

    def describe(self) -> dict[str, Any]:
        return {"version": openvino_genai.__version__}

    def forget(self) -> dict[str, Any]:
        return {}

    def speed(self, work: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, float]:
        todo = Work(**work)
        handles = [self._add(todo, stream) for stream in range(todo.streams)]
        started = [0] * todo.streams
        while not all(started):
            self._pipeline.step()
            started = [count + _read(handle) for count, handle in zip(started, handles, strict=True)]
        start = perf_counter()
        for _ in range(todo.steps):
            self._pipeline.step()
        seconds = perf_counter() - start
        made = sum(_read(handle) for handle in handles)
        for handle in handles:
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        if made != todo.tokens:
            raise BackendError(f"OpenVINO GenAI made {made} tokens in {todo.steps} steps, not {todo.tokens}")
        return {"tokens_per_s": made / seconds}

    def _add(self, work: Work, stream: int) -> Any:
        tokens = draw_tokens(work.context, f"{work.key} {stream}", self._n_vocab)
        config = openvino_genai.GenerationConfig()
        # Streams whose prompts come first generate while the other prompts are computed: a step each at most.
        config.max_new_tokens = work.steps + work.streams + 1
        config.ignore_eos = True
        config.do_sample = False
        self._requests += 1
        return self._pipeline.add_request(
            self._requests, openvino.Tensor(np.array(tokens, np.int64).reshape(1, -1)), config
        )


def _read(handle: Any) -> int:
    """How many tokens came since the last time."""
    count = 0
    while handle.can_read():
        count += sum(len(output.generated_ids) for output in handle.read().values())
    return count
