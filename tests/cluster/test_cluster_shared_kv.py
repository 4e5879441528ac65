"""Replicas that share a directory for K/V: one that joins later knows what the others have computed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster_load import ask, single_server
from llm_kit import LONG
from ray_kit import NATIVE, RayCluster, kill, merged, until


@pytest.mark.model
async def test_a_replica_starts_warm(cluster: RayCluster, tmp_path: Path) -> None:
    disk = {"kv": {"disk": {"enabled": True, "directory": str(tmp_path), "max_mb": 100}}}
    cluster.deploy(merged(NATIVE, disk), cluster={"replicas": 1})
    (old,) = cluster.replicas()
    body = {"prompt": LONG, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    async with single_server(NATIVE) as truth:
        await truth.check(await ask(cluster.url, body), body, "/v1/completions")
        await asyncio.to_thread(until, lambda: cluster.state(old)["disk_bytes"] > 0, "it is written")
        kill(old.pid)
        answer = await ask(cluster.url, body)
        await truth.check(answer, body, "/v1/completions")
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 256
    assert cluster.journal()[-1].replica != old.id
