"""The processes that route die: at most the requests that they had are lost, and nobody goes on computing those."""

from __future__ import annotations

import asyncio

import pytest

from cluster_load import BrokenConnectionError, ask, asked, load, single_server
from ray_kit import FAKE, RayCluster, kill, until


async def test_the_ingress_dies(cluster: RayCluster) -> None:
    cluster.deploy(FAKE)
    path, body = asked(1, tokens=2000)
    asking = [asyncio.create_task(ask(cluster.url, body, path)) for _ in range(6)]
    await asyncio.to_thread(until, lambda: sum(len(cluster.requests_of(each)) for each in cluster.replicas()) == 6)
    kill(*(each.pid for each in cluster.ingresses()))
    for broken in asking:
        with pytest.raises(BrokenConnectionError):
            await broken
    await asyncio.to_thread(cluster.wait_until_idle)
    await asyncio.to_thread(cluster.whole)
    path, body = asked(1)
    async with single_server(FAKE) as truth:
        await truth.check(await ask(cluster.url, body, path), body, path)


@pytest.mark.parametrize("name", ["ServeController", "ProxyActor"])
async def test_a_process_of_ray_serve_dies(cluster: RayCluster, name: str) -> None:
    """Requests do not even notice."""
    cluster.deploy(FAKE)
    async with single_server(FAKE) as truth, load(cluster.url, truth, 8, tokens=40) as asking:
        process = await asyncio.to_thread(cluster.process_named, name)
        kill(process)
        await asyncio.to_thread(until, lambda: cluster.process_named(name) != process, f"another {name}")
        answered = asking.right
        await asyncio.to_thread(until, lambda: asking.right > answered + 16)
    assert asking.broken == []
    # A replica that dies after that is replaced, so the controller works.
    victim = cluster.whole()[0]
    kill(victim.pid)
    await asyncio.to_thread(until, lambda: victim.id not in {each.id for each in cluster.replicas()})
    await asyncio.to_thread(cluster.whole)
    path, body = asked(1)
    async with single_server(FAKE) as truth:
        for url in (cluster.url, cluster.proxy_url):
            await truth.check(await ask(url, body, path), body, path)
