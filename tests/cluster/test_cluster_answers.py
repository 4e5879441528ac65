"""A cluster's answers are those of a single server."""

from __future__ import annotations

import asyncio

import pytest

from cluster_load import KINDS, asked, ask, meaning, single_server
from ray_kit import FAKE, RayCluster


@pytest.fixture(autouse=True)
def _deployed(cluster: RayCluster) -> None:
    cluster.deploy(FAKE)


async def test_every_kind_of_request(cluster: RayCluster) -> None:
    async with single_server(FAKE) as truth:
        answers = await asyncio.gather(*(ask(cluster.url, body, path) for path, body in map(asked, range(KINDS))))
        for number, answer in enumerate(answers):
            path, body = asked(number)
            print(number, answer.status, answer.body[:300])
            assert meaning(answer) == await truth.meaning(body, path), number
