"""Starts and stops the servers under test. One runs at a time, so that none takes the cores from another."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any

from cllm_bench.errors import BenchError
from cllm_bench.http import Address, HttpError
from cllm_bench.watch import pid_behind

_START_LIMIT_S = 180.0
_ANSWER_LIMIT_S = 3600.0
STOP_S = 15.0
_LOG_TAIL = 600
_LINE_LIMIT = 1 << 20
"""Longest line a runner may print."""


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers at `url`. `pid` is known where it runs on this machine."""

    url: str
    pid: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Runner:
    """One of `cllm_bench.runners` in a process of its own; it answers each line of JSON with another."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self._name = name
        self._process = process
        self._log = log
        self.pid = process.pid
        self.ready: dict[str, Any] = {}
        """What it said when it was ready."""

    async def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return await self.read_line(_ANSWER_LIMIT_S)

    async def read_line(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), limit_s)
            answer: dict[str, Any] = json.loads(line)
        except (asyncio.TimeoutError, ValueError):
            raise BenchError(f"{self._name} gave no answer; the end of its log: {_tail(self._log)}") from None
        if "error" in answer:
            raise BenchError(f"{self._name} failed: {answer['error']}")
        return answer


@asynccontextmanager
async def start_cllm(
    model: str,
    threads: int,
    backend: str,
    settings: Mapping[str, Any] | None = None,
    *,
    stop_s: float = STOP_S,
) -> AsyncIterator[Server]:
    """`cllm serve` with its defaults, but for what is given, and nothing kept on disk."""
    effective = {"model.name": model, "backend.type": backend, "backend.threads": threads, **(settings or {})}
    async with start_command("cLLM", ["serve"], effective, stop_s=stop_s) as server:
        facts = {"threads": threads, **await _model_facts(Address(server.url))}
        if settings:
            facts["settings"] = ", ".join(f"{key} {value}" for key, value in settings.items())
        yield replace(server, facts=facts)


@asynccontextmanager
async def start_command(
    name: str,
    arguments: Sequence[str],
    settings: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    stop_s: float = STOP_S,
) -> AsyncIterator[Server]:
    """A command of `cllm` that serves, on a free port of this machine; what an earlier run computed is not found."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    first = {"log.level": "warning", "kv.disk.enabled": False}
    command = [sys.executable, "-m", "cllm", *arguments]
    for key, value in {**first, **settings, "server.host": "127.0.0.1", "server.port": port}.items():
        command += ["--set", f"{key}={json.dumps(value) if isinstance(value, bool) else value}"]
    with tempfile.TemporaryFile() as log:
        async with running(command, log, stdout=log, environment=environment, stop_s=stop_s) as process:
            await until_ready(Address(url), name, process, log)
            yield Server(url, process.pid)


@asynccontextmanager
async def start_runner(name: str, module: str, wanted: Mapping[str, Any]) -> AsyncIterator[Runner]:
    """One of `cllm_bench.runners`, ready."""
    command = [sys.executable, "-m", f"cllm_bench.runners.{module}", json.dumps(dict(wanted))]
    with tempfile.TemporaryFile() as log:
        async with running(command, log, stdout=asyncio.subprocess.PIPE) as process:
            runner = Runner(name, process, log)
            runner.ready = await runner.read_line(_START_LIMIT_S)
            yield runner


@asynccontextmanager
async def already_running(url: str) -> AsyncIterator[Server]:
    yield Server(url, pid_behind(url), await _model_facts(Address(url)) | {"url": url})


@asynccontextmanager
async def running(
    command: Sequence[str],
    log: IO[bytes],
    *,
    stdout: IO[bytes] | int,
    environment: Mapping[str, str] | None = None,
    stop_s: float = STOP_S,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process while the block runs. Its standard input ends when we do, however we end.

    `environment` is added to ours; after `stop_s` it is killed. The process has a session of its own: Ctrl-C reaches
    the benchmark alone, which writes what it has and ends the servers.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=log,
        env={**os.environ, **(environment or {})},
        limit=_LINE_LIMIT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), stop_s)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()


async def _model_facts(address: Address) -> dict[str, Any]:
    """What cLLM says of itself; nothing where another server answers."""
    try:
        status, body = await address.fetch("/model/info")
        backend = json.loads(body)["data"]["backend"] if status == 200 else None
    except (HttpError, ValueError, LookupError, TypeError):
        return {}
    return {"backend": backend} if backend else {}


async def until_ready(address: Address, name: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
    deadline = asyncio.get_running_loop().time() + _START_LIMIT_S
    while asyncio.get_running_loop().time() < deadline and process.returncode is None:
        with suppress(HttpError):
            if (await address.fetch("/ready"))[0] == 200:
                return
        await asyncio.sleep(0.1)
    raise BenchError(f"{name} did not start; the end of its log: {_tail(log)}")


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read()[-_LOG_TAIL:].decode(errors="replace").strip() or "(empty)"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
