"""New settings, more and fewer replicas, under load: nothing is lost."""

from __future__ import annotations

import asyncio
from functools import partial

from cluster_load import load, single_server
from ray_kit import FAKE, Actor, RayCluster, merged, until

CLIENTS = 12
OTHER_LATENCY = {"backend": {"fake": {"latency_ms": 45.0}}}


async def test_new_settings(cluster: RayCluster) -> None:
    """Everything is replaced, the ingress too: old ones finish what they have."""
    few = merged(FAKE, {"cluster": {"replicas": 2, "surge_percent": 100}})
    cluster.deploy(few)
    old = {each.pid for each in [*cluster.replicas(), *cluster.ingresses()]}
    async with single_server(few) as truth, load(cluster.url, truth, CLIENTS, tokens=40) as asking:
        await asyncio.to_thread(cluster.update, merged(few, OTHER_LATENCY))

        def replaced() -> bool:
            return len(cluster.replicas()) == 2 and not old & {each.pid for each in cluster.all_actors()}

        await asyncio.to_thread(until, replaced, "the old ones are gone")
        answered = asking.right
        await asyncio.to_thread(until, lambda: asking.right > answered + CLIENTS, "the new ones work")
    assert asking.broken == []


async def test_more_and_fewer_replicas(cluster: RayCluster) -> None:
    one = merged(FAKE, {"cluster": {"replicas": 1}})
    cluster.deploy(one)
    ingress = cluster.ingresses()
    async with single_server(one) as truth, load(cluster.url, truth, CLIENTS, tokens=40) as asking:
        for count in (3, 1):
            await asyncio.to_thread(cluster.update, merged(one, {"cluster": {"replicas": count}}))
            replicas = await asyncio.to_thread(cluster.whole)
            await asyncio.to_thread(until, partial(all_used, cluster, replicas, len(cluster.journal())))
    assert asking.broken == []
    assert cluster.ingresses() == ingress, "the ingress stays the same"


def all_used(cluster: RayCluster, replicas: list[Actor], since: int) -> bool:
    return {entry.replica for entry in cluster.journal(since)} >= {each.id for each in replicas}
