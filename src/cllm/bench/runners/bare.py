"""llama.cpp with nothing around it: the least that any layer over it can be measured against.

    python -m cllm.bench.runners.bare '{"model": "file.gguf", "threads": 2, "slots": 8, "slot_tokens": 2048}'

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

import llama_cpp
import numpy as np

from cllm.bench.runners import say_ready

# Referenced for as long as llama.cpp may call it.
_NO_LOG = llama_cpp.llama_log_callback(lambda level, text, data: None)


class BareLlama:
    def __init__(self, *, model: str, threads: int, slots: int, slot_tokens: int) -> None:
        llama_cpp.llama_log_set(_NO_LOG, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {model}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context = llama_cpp.llama_init_from_model(self._model, _params(threads, slots, slot_tokens))
        if not self._context:
            raise SystemExit(f"llama.cpp makes no context of {slots} x {slot_tokens} tokens")

    def generate(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        """Greedy tokens of a sequence that starts empty, and the seconds from the start to each of them."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_rm(memory, 0, -1, -1)
        ids: list[int] = []
        times: list[float] = []
        pending = prompt
        start = perf_counter()
        while len(ids) < tokens:
            buffer = (ctypes.c_int32 * len(pending))(*pending)
            code = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(buffer, len(pending)))
            if code != 0:
                raise SystemExit(f"llama_decode failed with {code} at {len(ids)} tokens")
            logits = llama_cpp.llama_get_logits_ith(self._context, -1)
            ids.append(int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax()))
            times.append(perf_counter() - start)
            pending = ids[-1:]
        return ids, times


def _params(threads: int, slots: int, slot_tokens: int) -> Any:
    """The context that cLLM's backend makes for the same slots."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = slots * slot_tokens
    params.n_seq_max = params.n_outputs_max = slots
    params.n_batch, params.n_ubatch = 2048, 512
    params.n_threads = params.n_threads_batch = threads
    params.kv_unified = False
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.no_perf = True
    return params


def main() -> None:
    llama = BareLlama(**json.loads(sys.argv[1]))
    say_ready(built_for=llama_cpp.llama_print_system_info().decode())
    for line in sys.stdin:
        ids, times = llama.generate(**json.loads(line))
        print(json.dumps({"ids": ids, "times": times}), flush=True)


if __name__ == "__main__":
    main()
