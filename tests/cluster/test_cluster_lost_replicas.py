"""Replicas die and hang under load: every request ends exactly once, with the right answer."""

from __future__ import annotations

import asyncio
import itertools
import random

import httpx
import pytest

from breakable_replica import POISON
from cluster_load import Answer, Truth, ask, asked, load, single_server
from ray_kit import FAKE, Actor, RayCluster, kill, stopped, until
from thorough import EXHAUSTIVE

KILLS = 100 if EXHAUSTIVE else 12
CLIENTS = 40


@pytest.mark.timeout(900)
async def test_many_die(cluster: RayCluster) -> None:
    """One, two, or all of them at once; the clients notice nothing."""
    cluster.deploy(FAKE)
    before = len(cluster.journal())
    chance = random.Random(1)
    killed, rounds = 0, itertools.count()
    async with single_server(FAKE) as truth, load(cluster.url, truth, CLIENTS, tokens=40) as asking:
        while killed < KILLS:
            alive = await asyncio.to_thread(running, cluster, 3)
            some = chance.sample(alive, chance.randrange(1, len(alive)))
            victims = alive if next(rounds) % 5 == 3 else some
            kill(*(each.pid for each in victims))
            killed += len(victims)
            await asyncio.sleep(chance.random())
    assert asking.broken == [] and asking.right > KILLS
    journal = cluster.journal(before)
    resumed = {entry.request for entry in journal if entry.generated is not None}
    print(f"{killed} killed, {asking.right} answers, {len(resumed)} resumed")
    assert len(resumed) >= 5
    cluster.whole()
    cluster.wait_until_idle()


def running(cluster: RayCluster, count: int) -> list[Actor]:
    """At least so many replicas that are linked."""

    def enough() -> list[Actor] | None:
        found = [each for each in cluster.replicas() if cluster.state(each).get("ingresses")]
        return found if len(found) >= count else None

    found: list[Actor] = until(enough, f"{count} replicas")
    return found


async def test_one_hangs(cluster: RayCluster) -> None:
    """Its streams go on elsewhere. When it is awake again, it is used again."""
    cluster.deploy(FAKE)
    async with single_server(FAKE) as truth:
        asking, started = streams(cluster, truth, 16)
        await asyncio.to_thread(until, lambda: len(started) == 16)
        victim = max(cluster.replicas(), key=lambda replica: len(cluster.requests_of(replica)))
        assert cluster.requests_of(victim)
        before = len(cluster.journal())
        with stopped(victim.pid):
            await asyncio.gather(*asking)
        resumed = [entry for entry in cluster.journal(before) if entry.generated is not None]
        assert resumed and all(entry.replica != victim.id for entry in resumed)
        replicas = await asyncio.to_thread(cluster.whole)
        await asyncio.to_thread(cluster.wait_until_idle)
        await asyncio.to_thread(until, lambda: linked(cluster) == {each.id for each in replicas})
    before = len(cluster.journal())
    for number in range(500):  # nothing of these is cached, so whoever has had the least to do gets the next
        answer = await ask(cluster.url, {"prompt": f"{number} is a number. " * 5, "max_tokens": 1})
        assert answer.status == 200
        if {entry.replica for entry in cluster.journal(before)} == {each.id for each in replicas}:
            return
    pytest.fail("a replica is not used again")


def linked(cluster: RayCluster) -> set[str]:
    """Replicas that the ingress can use."""
    found = httpx.get(f"{cluster.url}/kv", timeout=60).json()["replicas"]
    return {name for name, each in found.items() if each["state"] == "running"}


def streams(cluster: RayCluster, truth: Truth, count: int) -> tuple[list[asyncio.Task[None]], set[int]]:
    """So many streams, each of which is checked; and those that have begun."""
    begun: set[int] = set()

    async def client(number: int) -> None:
        path, body = asked(2 * number + 1, tokens=150)

        def on_data(answer: Answer) -> None:
            if answer.events:
                begun.add(number)

        await truth.check(await ask(cluster.url, body, path, on_data=on_data), body, path)

    return [asyncio.create_task(client(number)) for number in range(count)], begun


async def test_a_request_that_kills_its_replicas(cluster: RayCluster) -> None:
    """It fails in the end, and the cluster lives on."""
    cluster.deploy(FAKE, cluster={"max_sends": 2})
    async with single_server(FAKE) as truth, load(cluster.url, truth, 8) as asking:
        answer = await ask(cluster.url, {"prompt": f"This {POISON}.", "max_tokens": 5})
        assert answer.status == 500
        assert answer.json["error"]["message"] == "2 replicas were lost while they worked on this request"
        await asyncio.to_thread(cluster.whole)
    assert asking.broken == []
