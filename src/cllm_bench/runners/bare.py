"""llama.cpp with nothing around it: the least that any layer over it can be measured against.

    python -m cllm_bench.runners.bare '{"model": "file.gguf", "threads": 2, "slots": 8, "slot_tokens": 2048}'

A process of its own, so that it shares no interpreter, threads or memory with what it is compared to. It prints one
line of JSON when it is ready, then answers each line `{"prompt": [ids], "tokens": n}` with the greedy tokens and their
times. It ends when its standard input does.
"""

from __future__ import annotations

import ctypes
import json
import sys
from time import perf_counter
from typing import Any

import numpy as np

from cllm.backends.llama_cpp.library import load_library
from cllm_bench.runners import Handler, answer_lines

_API = load_library().api


class BareLlama:
    def __init__(self, *, model: str, threads: int, slots: int, slot_tokens: int) -> None:
        self._model = _API.llama_model_load_from_file(model.encode(), _API.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {model}")
        self._vocab = _API.llama_vocab_n_tokens(_API.llama_model_get_vocab(self._model))
        self._context = _API.llama_init_from_model(self._model, _params(threads, slots, slot_tokens))
        if not self._context:
            raise SystemExit(f"llama.cpp makes no context of {slots} x {slot_tokens} tokens")

    def generate(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Greedy tokens of a sequence that starts empty, and the seconds from the start to each of them."""
        memory = _API.llama_get_memory(self._context)
        _API.llama_memory_seq_rm(memory, 0, -1, -1)
        ids: list[int] = []
        times: list[float] = []
        pending = prompt
        start = perf_counter()
        while len(ids) < tokens:
            buffer = (ctypes.c_int32 * len(pending))(*pending)
            code = _API.llama_decode(self._context, _API.llama_batch_get_one(buffer, len(pending)))
            if code != 0:
                raise SystemExit(f"llama_decode failed with {code} at {len(ids)} tokens")
            logits = _API.llama_get_logits_ith(self._context, -1)
            ids.append(int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax()))
            times.append(perf_counter() - start)
            pending = ids[-1:]
        return {"ids": ids, "times": times}


def _params(threads: int, slots: int, slot_tokens: int) -> Any:
    """The context that cLLM's backend makes for the same slots."""
    params = _API.llama_context_default_params()
    params.n_ctx = slots * slot_tokens
    params.n_seq_max = params.n_outputs_max = slots
    params.n_batch, params.n_ubatch = 2048, 512
    params.n_threads = params.n_threads_batch = threads
    params.kv_unified = False
    params.flash_attn_type = _API.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.no_perf = True
    return params


def start() -> tuple[dict[str, Any], Handler]:
    llama = BareLlama(**json.loads(sys.argv[1]))
    return {"built_for": _API.llama_print_system_info().decode()}, llama.generate


if __name__ == "__main__":
    answer_lines(start)
