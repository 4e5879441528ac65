"""Runs llama.cpp's own HTTP server out of the wheel `xllamacpp`, in a process of its own.

    python -m cllm.bench.llama_server '{"model": "file.gguf", "threads": 2, "parallel": 8, "slot_tokens": 512}'

Prints one line of JSON when it is ready (its address, and how its library was built) and ends when its standard input
does, so that it never outlives the benchmark.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import xllamacpp


def server_params(wanted: dict[str, Any]) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = wanted["model"]
    params.cpuparams.n_threads = wanted["threads"]
    params.cpuparams_batch.n_threads = wanted["threads"]
    params.n_parallel = wanted["parallel"]
    params.n_ctx = wanted["parallel"] * wanted["slot_tokens"]
    params.n_batch = wanted["batch"]
    params.n_ubatch = min(512, wanted["batch"])
    params.kv_unified = wanted["unified"]
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cont_batching = True
    params.cache_prompt = True
    params.cache_ram_mib = 8192
    params.fit_params = False  # it must not change what was asked for
    params.ui = False
    params.port = 0
    return params


def main() -> None:
    server = xllamacpp.Server(server_params(json.loads(sys.argv[1])))
    ready = {"url": server.listening_address, "built_for": xllamacpp.get_system_info()}
    print(json.dumps(ready), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
