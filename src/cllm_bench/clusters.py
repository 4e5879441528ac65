"""Starts a cluster of fake replicas on this machine: the HTTP, routing and caching are real, only the model is not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from cllm_bench.errors import BenchError
from cllm_bench.http import Address, HttpError
from cllm_bench.pages.extras import check_extra
from cllm_bench.servers import Server, start_command

_JOIN_LIMIT_S = 120.0
_STOP_CLUSTER_S = 120.0
"""Ray, too, must have ended before something else is measured."""
_FAKE = {"backend.type": "fake"}
_CLUSTER = {"cluster.cpus": 0, "cluster.ray_port": 0, "cluster.drain_s": 1}


@asynccontextmanager
async def start_fake_server(settings: Mapping[str, Any]) -> AsyncIterator[Server]:
    """`cllm serve` with the fake backend."""
    async with start_command("cLLM", ["serve"], {**_FAKE, **settings}) as server:
        yield server


@asynccontextmanager
async def start_cluster(replicas: int, settings: Mapping[str, Any]) -> AsyncIterator[Server]:
    """`cllm cluster up` with a Ray of its own, ready when every replica has joined."""
    check_extra("ray", "this benchmark", "cluster")
    with tempfile.TemporaryDirectory(prefix="cllm-bench-") as directory:
        cluster = {**_FAKE, **_CLUSTER, "cluster.replicas": replicas, **settings}
        environment = {"CLLM_CACHE_DIR": directory}
        async with start_command(
            "the cluster", ["cluster", "up"], cluster, environment=environment, stop_s=_STOP_CLUSTER_S
        ) as server:
            await _until_joined(Address(server.url), replicas)
            yield server


async def replica_pids(address: Address) -> dict[str, int]:
    """Process ids of the replicas that the ingress has a link to."""
    status, body = await address.fetch("/kv")
    found = json.loads(body).get("replicas", {}) if status == 200 else {}
    return {name: each["pid"] for name, each in found.items() if each.get("pid")}


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def _until_joined(address: Address, replicas: int) -> None:
    deadline = asyncio.get_running_loop().time() + _JOIN_LIMIT_S
    while asyncio.get_running_loop().time() < deadline:
        with suppress(HttpError, ValueError):
            if len(await replica_pids(address)) >= replicas:
                return
        await asyncio.sleep(0.2)
    raise BenchError(f"not all of {replicas} replicas joined the cluster within {_JOIN_LIMIT_S:.0f} s")
