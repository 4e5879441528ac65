"""Starts and stops the servers under test. One runs at a time, so that none takes the cores from another."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

from cllm.bench.client import BenchError
from cllm.bench.peers import PeerSettings, require_llama_server

_START_LIMIT_S = 180.0
_STOP_LIMIT_S = 15.0
_LOG_TAIL = 600


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers at `url`. `pid` is known where we started it."""

    url: str
    pid: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def start_cllm(model: str, threads: int, backend: str) -> AsyncIterator[Server]:
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    settings = {
        "model.name": model,
        "backend.type": backend,
        "backend.threads": threads,
        "server.host": "127.0.0.1",
        "server.port": port,
        "log.level": "warning",
    }
    command = [sys.executable, "-c", "from cllm.cli import main; main()", "serve"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    with tempfile.TemporaryFile() as log:
        async with _running("cLLM", command, log, stdout=log) as process:
            await _until_ready(f"{url}/ready", "cLLM", process, log)
            yield Server(url, process.pid, {"backend": backend, "threads": threads})


@asynccontextmanager
async def start_llama_server(model: Path, threads: int, settings: PeerSettings) -> AsyncIterator[Server]:
    require_llama_server()
    wanted = {"model": str(model), "threads": threads, **asdict(settings)}
    command = [sys.executable, "-m", "cllm.bench.llama_server", json.dumps(wanted)]
    with tempfile.TemporaryFile() as log:
        async with _running("llama-server", command, log, stdout=asyncio.subprocess.PIPE) as process:
            ready = await read_ready_line("llama-server", process, log)
            facts = {"settings": str(settings), "threads": threads, "built_for": ready["built_for"]}
            yield Server(ready["url"], process.pid, facts)


@asynccontextmanager
async def _running(
    name: str, command: Sequence[str], log: IO[bytes], *, stdout: IO[bytes] | int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process while the block runs. Its standard input ends when we do, however we end."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=stdout, stderr=log
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_LIMIT_S)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()


async def _until_ready(url: str, name: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
    deadline = asyncio.get_running_loop().time() + _START_LIMIT_S
    async with httpx.AsyncClient() as http:
        while asyncio.get_running_loop().time() < deadline:
            if process.returncode is not None:
                break
            with suppress(httpx.HTTPError):
                if (await http.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.1)
    raise _start_failed(name, log)


async def read_ready_line(name: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> dict[str, Any]:
    """The line of JSON that our runners print when they are ready."""
    assert process.stdout is not None
    with suppress(asyncio.TimeoutError, ValueError):
        line = await asyncio.wait_for(process.stdout.readline(), _START_LIMIT_S)
        ready: dict[str, Any] = json.loads(line)
        return ready
    raise _start_failed(name, log)


def _start_failed(name: str, log: IO[bytes]) -> BenchError:
    log.seek(0)
    tail = log.read()[-_LOG_TAIL:].decode(errors="replace").strip()
    return BenchError(f"{name} did not start; the end of its log: {tail or '(empty)'}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
