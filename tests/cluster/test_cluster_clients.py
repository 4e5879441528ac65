"""What clients see of a cluster is what they see of a single server: refusals, deadlines, limits, ids."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from typing import Any

import pytest

from cluster_load import Answer, ask, asked, single_server
from ray_kit import FAKE, RayCluster, merged, until

KEY = "a-key-of-the-tests"
SETTINGS = merged(
    FAKE, {"server": {"api_key": KEY}, "cluster": {"replicas": 2}, "scheduler": {"max_running": 2, "max_queue": 2}}
)
AUTHORISED = {"authorization": f"Bearer {KEY}"}
LONG = {"prompt": "On and on", "max_tokens": 3000, "ignore_eos": True}

WRONG: list[tuple[str, dict[str, Any] | bytes]] = [
    ("/v1/completions", b"{"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}),
    ("/v1/completions", {"prompt": "a", "n": 0}),
    ("/v1/completions", {"prompt": "a" * 9000}),
    ("/v1/completions", {"prompt": [4, 5, 100_000]}),
    ("/v1/completions", {"prompt": "a", "model": "another"}),
    ("/v1/chat/completions", {"messages": []}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}},
    ),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "timeout": 0.3}),
    ("/nowhere", {}),
]


@pytest.fixture(autouse=True)
def _deployed(cluster: RayCluster) -> None:
    cluster.deploy(SETTINGS)


def without_id(answer: Answer) -> Any:
    return answer.status, re.sub(r"(cmpl-|chatcmpl-)?[0-9a-f]{32}", "ID", answer.body.decode())


async def test_refusals(cluster: RayCluster) -> None:
    # The single server is as slow as the replicas: one of these ends at its deadline.
    slow = SETTINGS["backend"]["fake"]["latency_ms"]
    async with single_server(SETTINGS, latency_ms=slow) as truth:
        for path, body in WRONG:
            answer = await ask(cluster.url, body, path, headers=AUTHORISED)
            expected = await truth.answer(body, path, AUTHORISED)
            assert answer.status >= 400, body
            assert without_id(answer) == without_id(expected), (path, body)
        for headers in ({}, {"authorization": "Bearer another"}):
            answer = await ask(cluster.url, LONG, headers=headers)
            assert answer.status == 401
            assert without_id(answer) == without_id(await truth.answer(LONG, headers=headers))


async def test_a_full_queue(cluster: RayCluster) -> None:
    """Each replica has one of its own; a request is refused when all are full."""
    enough = [asyncio.create_task(ask(cluster.url, LONG, headers=AUTHORISED)) for _ in range(9)]
    try:
        await asyncio.wait(enough, return_when="FIRST_COMPLETED")
        refused = next(task.result() for task in enough if task.done())
        assert refused.status == 429
        assert int(refused.header("retry-after")[0]) >= 1
    finally:
        for task in enough:
            task.cancel()
        await asyncio.gather(*enough, return_exceptions=True)
    await asyncio.to_thread(cluster.wait_until_idle)


def _works_on_something(cluster: RayCluster, asking: asyncio.Task[Answer]) -> bool:
    return asking.done() or any(map(cluster.requests_of, cluster.replicas()))


async def being_answered(cluster: RayCluster, url: str) -> asyncio.Task[Answer]:
    """A long stream that a replica works on. Jobs of clients that left may still be on their way and take all places:
    then it is asked for again, as clients do."""
    while True:
        asking = asyncio.create_task(ask(url, {**LONG, "stream": True, "n": 2}, headers=AUTHORISED))
        await asyncio.to_thread(until, partial(_works_on_something, cluster, asking))
        if not asking.done():
            return asking
        assert asking.result().status == 429, asking.result().body
        await asyncio.sleep(1)


@pytest.mark.parametrize("proxied", [False, True])
async def test_a_client_that_leaves(cluster: RayCluster, proxied: bool) -> None:
    url = cluster.proxy_url if proxied else cluster.url
    asking = await being_answered(cluster, url)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.to_thread(cluster.wait_until_idle)


@pytest.mark.parametrize("proxied", [False, True])
async def test_the_id_of_a_request(cluster: RayCluster, proxied: bool) -> None:
    url = cluster.proxy_url if proxied else cluster.url
    path, body = asked(1, tokens=5)
    for headers in ({}, {"x-request-id": "mine-17"}):
        answer = await ask(url, body, path, headers={**AUTHORISED, **headers})
        assert answer.status == 200
        (request_id,) = answer.header("x-request-id")
        assert not headers or request_id == "mine-17"
    refused = await ask(url, {"prompt": 5}, headers=AUTHORISED)
    assert refused.status == 400 and len(refused.header("x-request-id")) == 1


@pytest.mark.parametrize("proxied", [False, True])
async def test_many_prompts_in_one_request(cluster: RayCluster, proxied: bool) -> None:
    """Each is a job of its own, also where Ray Serve's proxy gives the whole request one id."""
    url = cluster.proxy_url if proxied else cluster.url
    body = {"prompt": ["one", "two", "three", "four", "five"], "max_tokens": 3, "ignore_eos": True}
    answer = await ask(url, body, headers=AUTHORISED)
    assert answer.status == 200, json.dumps(answer.json)
    assert len(answer.json["choices"]) == 5


async def test_priority(cluster: RayCluster) -> None:
    before = len(cluster.journal())
    answer = await ask(cluster.url, {"prompt": "a", "max_tokens": 2, "priority": -7}, headers=AUTHORISED)
    assert answer.status == 200, json.dumps(answer.json)
    assert [entry.priority for entry in cluster.journal(before)] == [-7]
