"""A cluster's answers are those of a single server, to the bit, also when a replica dies in the middle of them."""

from __future__ import annotations

import asyncio

import pytest

from cluster_load import KINDS, Answer, ask, asked, single_server
from ray_kit import FAKE, NATIVE, RayCluster, kill, until


async def test_every_kind_of_request(cluster: RayCluster) -> None:
    cluster.deploy(FAKE)
    async with single_server(FAKE) as truth:
        requests = list(map(asked, range(KINDS)))
        answers = await asyncio.gather(*(ask(cluster.url, body, path) for path, body in requests))
        for answer, (path, body) in zip(answers, requests, strict=True):
            await truth.check(answer, body, path)


@pytest.mark.model
async def test_a_real_model(cluster: RayCluster) -> None:
    cluster.deploy(NATIVE)
    async with single_server(NATIVE) as truth:
        requests = [asked(number, tokens=16) for number in range(KINDS)]
        answers = await asyncio.gather(*(ask(cluster.url, body, path) for path, body in requests))
        for answer, (path, body) in zip(answers, requests, strict=True):
            await truth.check(answer, body, path)
        assert len({entry.replica for entry in cluster.journal()[-KINDS:]}) == 2


@pytest.mark.model
async def test_a_real_model_whose_replica_dies(cluster: RayCluster) -> None:
    cluster.deploy(NATIVE)
    before = len(cluster.journal())
    started: dict[int, Answer] = {}
    # Streams, of every kind that generates as many tokens as it may.
    numbers = [1, 3, 5, 9, 13, 17, 19, 21]
    requests = {number: asked(number, tokens=40) for number in numbers}

    async def client(number: int) -> Answer:
        path, body = requests[number]
        return await ask(cluster.url, body, path, on_data=lambda answer: started.update({number: answer}))

    async with single_server(NATIVE) as truth:
        asking = [asyncio.create_task(client(number)) for number in numbers]
        await asyncio.to_thread(until, lambda: sum(len(each.events) > 4 for each in started.values()) > 4)
        victim = max(cluster.replicas(), key=lambda replica: len(cluster.requests_of(replica)))
        assert cluster.requests_of(victim)
        kill(victim.pid)
        for number, answer in zip(numbers, await asyncio.gather(*asking), strict=True):
            path, body = requests[number]
            await truth.check(answer, body, path)
    resumed = [entry for entry in cluster.journal(before) if entry.generated is not None]
    assert resumed and all(entry.replica != victim.id for entry in resumed)
