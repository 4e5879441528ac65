"""What a server's process and cache look like while it works, sampled beside the load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from cllm_bench.client import Client
from cllm_bench.http import HttpError

INTERVAL_S = 1.0


class Sample(NamedTuple):
    """One moment. What a server does not tell is None."""

    seconds: float
    cpu_percent: float | None
    """In percent of one core: 200 is two cores busy."""
    resident_mb: float | None
    kv_running_mb: float | None
    kv_cached_mb: float | None
    free_segments: int | None
    fragmentation_percent: float | None
    """Share of the free blocks that are not in the largest stretch of them; slots of a fixed size do not fragment."""


class Watcher:
    """Samples a server every `interval_s` while its block runs. `pid` is None where its process is elsewhere."""

    def __init__(self, client: Client, pid: int | None, interval_s: float = INTERVAL_S) -> None:
        self.samples: list[Sample] = []
        self._client = client
        self._process = _process(pid)
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        self._tells_kv = True
        self._begin = perf_counter()
        self._cpu_s = 0.0
        self._sampled_at = self._begin

    async def __aenter__(self) -> Watcher:
        self._begin = self._sampled_at = perf_counter()
        self._cpu_s = _cpu_seconds(self._process)
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if kind is None:
            await self._sample()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._sample()

    async def _sample(self) -> None:
        kv = await self._read_kv() if self._tells_kv else None
        now = perf_counter()
        cpu_s = _cpu_seconds(self._process)
        passed = now - self._sampled_at
        cpu = 100 * (cpu_s - self._cpu_s) / passed if self._process and passed > 0 else None
        self._cpu_s, self._sampled_at = cpu_s, now
        self.samples.append(Sample(now - self._begin, cpu, _resident_mb(self._process), *_cache(kv)))

    async def _read_kv(self) -> dict[str, Any] | None:
        """The cache as cLLM tells it. Other servers are not asked again; one that was only late is."""
        try:
            status, body = await self._client.address.fetch("/kv")
            kv = json.loads(body) if status == 200 else None
        except HttpError:
            return None
        except ValueError:
            kv = None
        self._tells_kv = isinstance(kv, dict) and "bytes_per_unit" in kv
        return kv if self._tells_kv else None


def resident_mb(pid: int) -> float:
    return _resident_mb(psutil.Process(pid)) or 0.0


def pid_behind(url: str) -> int | None:
    """The process that listens at a local address; None if it is elsewhere, or not ours to see."""
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            port = getattr(connection.laddr, "port", None)
            if connection.status == psutil.CONN_LISTEN and port == (parts.port or 80):
                pid: int | None = connection.pid
                return pid
    return None


def _process(pid: int | None) -> psutil.Process | None:
    with suppress(psutil.Error):
        return psutil.Process(pid) if pid is not None else None
    return None


def _cpu_seconds(process: psutil.Process | None) -> float:
    with suppress(psutil.Error):
        if process is not None:
            times = process.cpu_times()
            return float(times.user + times.system)
    return 0.0


def _resident_mb(process: psutil.Process | None) -> float | None:
    with suppress(psutil.Error):
        if process is not None:
            return float(process.memory_info().rss) / 1e6
    return None


def _cache(kv: Mapping[str, Any] | None) -> tuple[float | None, float | None, int | None, float | None]:
    if kv is None:
        return None, None, None, None
    unit = kv["bytes_per_unit"] / 1e6
    scattered = None
    if kv["layout"] == "paged":
        # The stretches are counted once a second, the free blocks at every step: the two may differ a little.
        scattered = 100 * max(0.0, 1 - kv["largest_free_span"] / kv["free"]) if kv["free"] else 0.0
    return kv["referenced"] * unit, kv["evictable"] * unit, kv["free_segments"], scattered
