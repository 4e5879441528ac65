"""The real server on a model of random weights, in a process of its own.

python -m cllm_bench.torch_gpu.server '{"model.name": …}' cuda
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cllm_bench.client import Client
from cllm_bench.http import Address
from cllm_bench.servers import free_port, running, until_ready
from cllm_bench.torch_gpu.engines import Place


@asynccontextmanager
async def served(place: Place, shape: str) -> AsyncIterator[Client]:
    port = free_port()
    settings = json.dumps(place.settings_for(shape, server__port=port))
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "cllm_bench.torch_gpu.server", settings, place.device]
        async with running(command, log, stdout=log) as process:
            await until_ready(Address(url), "the server", process, log)
            async with Client(url) as client:
                yield client


def main(settings: str, device: str) -> int:
    from cllm.cli.http_server import run_server
    from cllm.config import load_config
    from cllm_bench.runners import end_with_stdin
    from cllm_bench.torch_gpu.models import use_random_weights

    end_with_stdin()
    with use_random_weights(device):
        return run_server(load_config(None, json.loads(settings), environ={}).config)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
