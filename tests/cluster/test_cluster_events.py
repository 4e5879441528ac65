"""What replicas tell of their caches is lost or late: answers stay right, and the routing recovers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from breakable_replica import DELAY_EVENTS, LOSE_EVENTS, NO_CONTENT, TELL_CONTENT
from cluster_load import ask, single_server
from ray_kit import FAKE, RayCluster


def asked_about(topic: str, number: int) -> dict[str, Any]:
    """Long prompts, which have a topic in common."""
    return {"prompt": f"{topic} " * 60 + f"Question {number}", "max_tokens": 4, "ignore_eos": True, "seed": number}


async def answers(cluster: RayCluster, topic: str, count: int) -> Counter[str]:
    """Ask one after another, and check. How many of them each replica got."""
    before = len(cluster.journal())
    async with single_server(FAKE) as truth:
        for number in range(count):
            body = asked_about(topic, number)
            await truth.check(await ask(cluster.url, body), body, "/v1/completions")
    return Counter(entry.replica for entry in cluster.journal(before))


async def cached(cluster: RayCluster, topic: str) -> int:
    answer = await ask(cluster.url, asked_about(topic, 1000))
    tokens: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


@pytest.fixture(autouse=True)
def _deployed(cluster: RayCluster) -> None:
    cluster.deploy(FAKE)


async def test_no_events_at_all(cluster: RayCluster) -> None:
    """Requests go by load alone."""
    with cluster.fault(LOSE_EVENTS), cluster.fault(NO_CONTENT):
        found = [await answers(cluster, f"Topic {number} without news", 2) for number in range(8)]
    assert sum(found, Counter[str]()).keys() == {each.id for each in cluster.replicas()}


@pytest.mark.parametrize("fault", [LOSE_EVENTS, DELAY_EVENTS])
async def test_events_come_late_or_never(cluster: RayCluster, fault: str) -> None:
    """Afterwards a topic has a home again."""
    with cluster.fault(fault):
        await answers(cluster, f"Weather and {fault}", 6)
    with cluster.fault(TELL_CONTENT):
        await asyncio.sleep(0.5)
    await answers(cluster, f"Music and {fault}", 2)

    async def at_home() -> bool:
        return await cached(cluster, f"Music and {fault}") > 200 and await cached(cluster, f"Weather and {fault}") > 200

    for _ in range(10):
        if await at_home():
            return
        await asyncio.sleep(1)
    raise AssertionError("known prefixes are not found")
