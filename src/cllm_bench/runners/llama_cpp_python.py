"""Runs llama-cpp-python's own server.

python -m cllm_bench.runners.llama_cpp_python '{"model": "file.gguf", "threads": 2, "context_tokens": 512}'
"""

from __future__ import annotations

import json
import sys

import llama_cpp
import uvicorn
from llama_cpp.server.app import create_app
from llama_cpp.server.settings import ModelSettings, ServerSettings

from cllm_bench.runners import end_with_stdin, listening_socket, say_ready


def main() -> None:
    wanted = json.loads(sys.argv[1])
    model = ModelSettings(
        model=wanted["model"],
        n_ctx=wanted["context_tokens"],
        n_batch=2048,
        n_threads=wanted["threads"],
        n_threads_batch=wanted["threads"],
        logits_all=False,
        flash_attn=True,
        verbose=False,
    )
    # By default a new request breaks off the one that runs: no work with more than one client would come to its end.
    app = create_app(server_settings=ServerSettings(interrupt_requests=False), model_settings=[model])
    listener, url = listening_socket()
    end_with_stdin()
    say_ready(url=url, built_for=llama_cpp.llama_print_system_info().decode())
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
