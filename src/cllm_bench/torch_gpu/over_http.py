"""The real server in a process of its own, and streaming clients in others.

    python -m cllm_bench.torch_gpu.over_http serve '{"model.name": …}' cuda
    python -m cllm_bench.torch_gpu.over_http ask http://127.0.0.1:8000 64 128 128 1

Clients wait for a line on standard input and then ask all at once, each time with other prompts.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import IO, Any

from cllm_bench.client import Client
from cllm_bench.http import Address, HttpError
from cllm_bench.load import at_most
from cllm_bench.runners import end_with_stdin, listening_socket
from cllm_bench.servers import running
from cllm_bench.stats import percentile

from .work import Keep, Measures, Place

START_LIMIT_S = 180.0
MODULE = "cllm_bench.torch_gpu.over_http"
Process = asyncio.subprocess.Process


async def http(place: Place, keep: Keep) -> None:
    sizes = place.sizes
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(_server(place))
        each = sizes.many // sizes.client_processes
        clients = [
            await stack.enter_async_context(_client(url, each, sizes.stream_in, sizes.stream_out, seed))
            for seed in range(sizes.client_processes)
        ]
        await _round(clients)  # for the graphs that are made when they are first needed
        runs = [await _round(clients) for _ in range(sizes.repeats)]
    runs.sort(key=lambda run: run["tokens_per_s"])
    rates = [run["tokens_per_s"] for run in runs]
    keep("8B over HTTP", runs[len(runs) // 2] | {"all": rates, "clients": sizes.many})


@asynccontextmanager
async def _server(place: Place) -> AsyncIterator[str]:
    listener, url = listening_socket()
    port = listener.getsockname()[1]
    listener.close()
    settings = place.settings_for("8B", server__port=port)
    command = [sys.executable, "-m", MODULE, "serve", json.dumps(settings), place.device]
    with tempfile.TemporaryFile() as log:
        async with running(command, log, stdout=log) as process:
            await _until_ready(url, process, log)
            yield url


async def _until_ready(url: str, process: Process, log: IO[bytes]) -> None:
    address, deadline = Address(url), time.monotonic() + START_LIMIT_S
    while process.returncode is None and time.monotonic() < deadline:
        with suppress(HttpError):
            if (await address.fetch("/ready"))[0] == 200:
                return
        await asyncio.sleep(0.2)
    log.seek(0)
    raise RuntimeError(f"the server did not start: {log.read()[-2000:].decode(errors='replace')}")


@asynccontextmanager
async def _client(url: str, streams: int, prompt: int, tokens: int, seed: int) -> AsyncIterator[Process]:
    numbers = map(str, (streams, prompt, tokens, seed))
    command = [sys.executable, "-m", MODULE, "ask", url, *numbers]
    with tempfile.TemporaryFile() as log:
        async with running(command, log, stdout=asyncio.subprocess.PIPE) as process:
            await _line(process)
            yield process


async def _line(process: Process) -> Any:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a client process ended early")
    return json.loads(line)


async def _round(clients: list[Process]) -> Measures:
    for client in clients:
        assert client.stdin is not None
        client.stdin.write(b"go\n")
    found = [await _line(client) for client in clients]
    errors = [each["error"] for each in found if each["error"]]
    if errors:
        raise RuntimeError(f"a request failed: {errors[0]}")
    # All processes of a machine share this clock.
    seconds = max(each["ended"] for each in found) - min(each["started"] for each in found)
    tokens = sum(each["tokens"] for each in found)
    firsts = [first for each in found for first in each["firsts"]]
    return {
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "first_token_p50_s": percentile(firsts, 50),
        "first_token_p95_s": percentile(firsts, 95),
        "events_per_token": sum(each["events"] for each in found) / tokens,
    }


# -- the processes ------------------------------------------------------------------------------------------------


def serve(settings: str, device: str) -> int:
    from cllm.cli.http_server import run_server
    from cllm.config import load_config

    from .models import use_random_weights

    end_with_stdin()
    use_random_weights(device)
    return run_server(load_config(None, json.loads(settings), environ={}).config)


async def ask(url: str, streams: int, prompt: int, tokens: int, seed: int) -> None:
    source = random.Random(seed)
    async with Client(url) as client:
        print(json.dumps("ready"), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            # A letter is a token of the made-up tokenizer.
            texts = ["".join(source.choices(string.ascii_lowercase + " ", k=prompt)) for _ in range(streams)]
            answers = await at_most(streams, [partial(client.complete, text, tokens) for text in texts])
            report = {
                "started": min(answer.started for answer in answers),
                "ended": max(answer.finished or 0.0 for answer in answers),
                "tokens": sum(answer.completion_tokens for answer in answers),
                "events": sum(len(answer.arrivals) for answer in answers),
                "firsts": [answer.ttft for answer in answers],
                "error": next((answer.error for answer in answers if answer.error), None),
            }
            print(json.dumps(report), flush=True)
            client.answers.clear()


def main() -> int:
    what, *rest = sys.argv[1:]
    if what == "serve":
        return serve(*rest)
    url, *numbers = rest
    asyncio.run(ask(url, *map(int, numbers)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
