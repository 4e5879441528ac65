"""Runs llama.cpp's own HTTP server out of the wheel `xllamacpp`.

python -m cllm_bench.runners.llama_server '{"model": "file.gguf", "threads": 2, "slots": 8, "slot_tokens": 512,
                                            "batch": 2048}'
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
    params.n_parallel = wanted["slots"]
    params.n_ctx = wanted["slots"] * wanted["slot_tokens"]
    params.n_batch = wanted["batch"]
    params.n_ubatch = min(512, wanted["batch"])
    params.kv_unified = False
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cont_batching = True
    params.cache_prompt = True
    params.swa_full = wanted.get("swa_full", False)
    params.cache_ram_mib = 8192
    params.fit_params = False  # it must not change what was asked for
    params.ui = False
    params.port = 0
    return params


def main() -> None:
    server = xllamacpp.Server(server_params(json.loads(sys.argv[1])))
    print(json.dumps({"url": server.listening_address}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
