"""A cluster seen as a whole, over HTTP: the KV cache, metrics, the page's stream, pins, and limits of keys."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cllm.cluster import link_server
from cllm.cluster.everywhere import results, together
from cllm.cluster.totals import total_details, total_snapshot, total_usage
from cllm.config import Config, ServerConfig
from cllm.engine.submission import Submission
from cllm.errors import InvalidRequestError, ModelUnavailableError, OverloadedError
from cllm.kv.pins import WarmResult
from cllm.kv.usage import DiskNumbers, HostNumbers
from cllm.llm import ONE_TOKEN
from cllm.observe.metrics import MetricsObserver
from cllm.server.app import create_app
from cllm.server.auth.key_file import add_key
from cllm.server.auth.tenants import Tenants
from cluster_kit import LIMIT_S, LocalCluster, until
from http_kit import client_for, served
from metrics_kit import KV, SNAPSHOT, record
from page_stream import reading

PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom. "
BODY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def config_of(*, latency_ms: float = 0.0, **sections: Any) -> Config:
    backend = {"type": "fake", "fake": {"layout": "paged", "latency_ms": latency_ms}}
    return Config.model_validate({"backend": backend, "model": {"alias": "tiny"}, **sections})


@asynccontextmanager
async def cluster_of(replicas: int = 2, **settings: Any) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    async with LocalCluster(config_of(**settings), replicas=replicas) as llm, client_for(llm) as client:
        client.timeout = httpx.Timeout(LIMIT_S)
        yield llm, client  # type: ignore[misc]


async def complete(client: httpx.AsyncClient, prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json={**BODY, "prompt": prompt, **more})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def samples(client: httpx.AsyncClient) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = (await client.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def sums(found: Mapping[tuple[str, frozenset[tuple[str, str]]], float], name: str) -> float:
    return sum(value for (each, _), value in found.items() if each == name)


# -- sums ----------------------------------------------------------------------------------------------------------


def test_numbers_of_replicas_are_added_as_each_needs() -> None:
    disk = DiskNumbers(bytes=500, limit_bytes=1000, written_bytes=7)
    one = KV._replace(disk=disk, host=HostNumbers(limit_bytes=10), contiguity=0.5, largest_free_span=40)
    two = KV._replace(disk=disk, host=HostNumbers(limit_bytes=20), contiguity=1.0, largest_free_span=50, referenced=30)
    total = total_usage([("a", one), ("a", two)])
    assert (total.total, total.referenced, total.evictions, total.host.limit_bytes) == (200, 40, 14, 30)
    assert (total.layout, total.unit_tokens, total.bytes_per_unit) == ("paged", 16, 1024)
    assert [(group.kind, group.block_bytes, group.used, group.evictable) for group in total.groups] == [
        ("full", 1024, 16, 56),
        ("window", 2048, 2, 2),
    ]
    assert (total.snapshots, total.snapshots_taken) == (4, 18)
    assert total.largest_free_span == 50
    assert total.contiguity == pytest.approx((0.5 * 10 + 1.0 * 30) / 40)
    # Replicas of one machine keep K/V in one directory.
    assert (total.disk.bytes, total.disk.limit_bytes, total.disk.written_bytes) == (500, 1000, 14)
    assert total_usage([("a", one), ("b", two)]).disk.bytes == 1000
    whole = total_snapshot(
        [("a", SNAPSHOT), ("b", SNAPSHOT._replace(uptime_s=3.0, finished={"stop": 1, "timeout": 2}))]
    )
    assert (whole.running, whole.waiting, whole.generated_tokens) == (4, 10, 198)
    assert whole.uptime_s == 12.5
    assert whole.finished == {"stop": 5, "length": 3, "cancelled": 2, "timeout": 2}


def test_a_prefix_that_is_pinned_on_several_replicas_is_one_line() -> None:
    def pins(until: float | None, *ids: str) -> dict[str, Any]:
        line = {
            "state": "pinned",
            "prefix": 7,
            "tokens": 16,
            "bytes": 100,
            "source": "warm",
            "shared": False,
            "uses": 1,
        }
        lines = [{**line, "id": each, "since": 5.0, "until": until} for each in ids]
        numbers = {"limit_bytes": 1000, "pinned_bytes": 100, "refused": 1, "expired": 0, "gave_way": 0}
        return {"pins": {**numbers, "prefixes": lines}, "disk": None}

    found = total_details({"one": pins(9.0, "x"), "two": pins(None, "x", "y")})
    assert found["disk"] is None
    assert found["pins"]["limit_bytes"] == 2000
    first, second = found["pins"]["prefixes"]
    assert (first["id"], first["replicas"], first["bytes"], first["until"]) == ("x", ["one", "two"], 200, None)
    assert (second["id"], second["replicas"], second["prefix"]) == ("y", ["two"], None)


def test_what_failed_on_some_replicas_is_said() -> None:
    assert results({"one": 1, "two": 2}, "it is done") == {"one": 1, "two": 2}
    with pytest.raises(InvalidRequestError, match="too long"):
        results({"one": InvalidRequestError("too long"), "two": InvalidRequestError("too long")}, "it is done")
    with pytest.raises(ModelUnavailableError, match="it is done on 1 of 2 replicas, not on two: the queue is full"):
        results({"one": 1, "two": OverloadedError("the queue is full", 1.0)}, "it is done")
    done = WarmResult(100, 64, 0.5, "id", 96, None, None)
    assert together({"one": done, "two": done._replace(cached=0, seconds=2.0)}) == done._replace(cached=0, seconds=2.0)
    refused = together({"one": done, "two": done._replace(pin_id=None, pinned_tokens=0, refusal="no room")})
    assert (refused.pin_id, refused.pinned_tokens) == (None, 0)
    assert refused.refusal == "on 1 of 2 replicas: two: no room"


def test_a_replicas_histograms_are_small_and_survive_the_link() -> None:
    observer = MetricsObserver()
    observer.on_finished(record())
    data = pickle.dumps(observer)
    assert len(data) < 8192
    copy = pickle.loads(data)
    assert {name: each.buckets() for name, each in copy.histograms.items()} == {
        name: each.buckets() for name, each in observer.histograms.items()
    }


# -- /kv and /metrics ----------------------------------------------------------------------------------------------


async def test_the_kv_cache_of_all_replicas_and_of_each() -> None:
    async with cluster_of() as (llm, client):
        await complete(client)
        await llm.caught_up()
        found = (await client.get("/kv")).json()
        replicas = found["replicas"]
        assert set(replicas) == set(llm.local.names)
        assert {each["state"] for each in replicas.values()} == {"running"}
        assert {each["node"] for each in replicas.values()} == {"127.0.0.1"}
        for number in ("total", "free", "evictable", "query_tokens"):
            assert found[number] == sum(each[number] for each in replicas.values())
        assert found["evictable"] > 0 and found["query_tokens"] == len(PROMPT)
        single = llm.local.llm_of(llm.local.names[0]).executor.kv()
        assert set(found) == {*single, "replicas"}
        assert set(replicas[llm.local.names[0]]) == {*single, "node", "pid", "state"}


async def test_the_numbers_are_those_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster_of(latency_ms=20) as (llm, client):
        await llm.caught_up()
        monkeypatch.setattr(link_server, "REPORT_S", 1e9)  # replicas report once more, and then only if they are asked
        asked = [asyncio.ensure_future(complete(client, f"{n} {PROMPT}", max_tokens=500)) for n in range(6)]
        await until(lambda: sum(len(llm.local.members[name].jobs) for name in llm.local.names) == 6)
        found, metrics = (await client.get("/kv")).json(), await samples(client)
        assert found["running"] + found["waiting"] == 6
        states = ("cllm:num_requests_running", "cllm:num_requests_waiting")
        assert sum(sums(metrics, name) for name in states) == 6
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_a_replica_is_listed_before_it_has_reported_and_while_it_drains() -> None:
    async with cluster_of(latency_ms=20) as (llm, client):
        first, second = llm.local.names
        peer = llm.remote._peers.connected[first]  # type: ignore[union-attr]
        report, peer.report = peer.report, None
        statuses = {status.name: status.state for status in llm.remote.statuses()}
        assert statuses[first] == "joining" and statuses[second] in ("running", "joining")
        peer.report = report
        working = [asyncio.ensure_future(complete(client, f"{n} {PROMPT}", max_tokens=100)) for n in range(4)]
        await until(lambda: all(llm.local.members[name].jobs for name in (first, second)))
        drained = asyncio.ensure_future(llm.local.drain(first))
        await until(lambda: {status.name: status.state for status in llm.remote.statuses()}.get(first) == "draining")
        assert (await client.get("/kv")).json()["replicas"][first]["state"] == "draining"
        await asyncio.gather(*working)
        await drained
        await llm.settled()
        assert set((await client.get("/kv")).json()["replicas"]) == {second}


async def test_without_a_replica_there_is_one_clear_error_and_metrics_go_on() -> None:
    async with cluster_of(1) as (llm, client):
        await llm.local.kill(llm.local.names[0])
        await until(lambda: not llm.remote.peers)
        for answer in (await client.get("/kv"), await client.delete("/kv/warm/abc"), await client.get("/kv/stream")):
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["message"].startswith("no replica is available")
            assert "retry-after" in answer.headers
        found = await samples(client)
        assert found["cllm_replicas", frozenset({("state", "running")})] == 0
        assert (await client.get("/ready")).status_code == 503
        await llm.add_replica()
        assert (await client.get("/kv")).status_code == 200


async def test_metrics_of_each_replica_and_of_the_router() -> None:
    async with cluster_of() as (llm, client):
        for number in range(6):
            await complete(client, f"{number} {PROMPT}")
        await llm.caught_up()
        await complete(client, f"0 {PROMPT}")
        await llm.caught_up()
        found = await samples(client)
        labels = [dict(labels) for (name, labels) in found if name == "cllm:generation_tokens_total"]
        assert labels == [{"model_name": "tiny", "replica": name} for name in sorted(llm.local.names)]
        assert sums(found, "cllm:generation_tokens_total") == 28
        assert sums(found, "cllm:time_to_first_token_seconds_count") == 7
        assert sums(found, "cllm_router_requests_total") == 7
        assert sums(found, "cllm_router_decision_seconds_count") == 7
        assert sums(found, "cllm_router_prompt_tokens_total") == 7 * (len(PROMPT) + 2)
        assert sums(found, "cllm_router_expected_hit_tokens_total") >= 64
        assert sums(found, "cllm_router_index_blocks") > 0
        assert sums(found, "cllm_ingress_streams") == 0
        assert found["cllm_replicas", frozenset({("state", "running")})] == 2
        # Every metric of a single server is there for each replica.
        single = {family.name for family in llm.local.llm_of(llm.local.names[0]).metrics("cllm").collect()}
        text = (await client.get("/metrics")).text
        served_families = {family.name for family in text_string_to_metric_families(text)}
        assert single <= served_families


async def test_retries_and_resumed_streams_are_counted() -> None:
    async with cluster_of(latency_ms=20) as (llm, client):
        asking = asyncio.ensure_future(complete(client, max_tokens=60))
        await until(lambda: any(request.generated > 2 for request in llm.requests()))
        (busy,) = [name for name, member in llm.local.members.items() if member.jobs]
        await llm.local.kill(busy)
        await asking
        found = await samples(client)
        assert sums(found, "cllm_router_resumed_streams_total") == 1
        assert sums(found, "cllm_router_failed_requests_total") == 0
        assert {dict(labels)["replica"] for name, labels in found if name == "cllm_router_requests_total"} == {
            *llm.local.names
        }


# -- the page ------------------------------------------------------------------------------------------------------


async def test_the_pages_stream_has_a_line_for_each_replica_and_no_map() -> None:
    async with LocalCluster(config_of(), replicas=2) as llm, served(llm) as app:
        await llm.warm(Submission(llm.text.tokenizer.encode(PROMPT), ONE_TOKEN))
        async with reading(app.url) as events:
            async for reader in events:
                lines = reader.known["replicas"]
                if sum(line["generated_tokens"] for line in lines) == 2:
                    break
        assert [line["name"] for line in lines] == sorted(llm.local.names)
        assert all(line["state"] == "running" and line["node"] == "127.0.0.1" for line in lines)
        assert reader.known["cells"] == 0
        assert reader.known["now"]["kv"]["total"] == sum(
            llm.local.llm_of(name).executor.snapshot().kv.total for name in llm.local.names
        )


# -- pins ----------------------------------------------------------------------------------------------------------


async def test_a_prefix_is_warmed_and_unpinned_on_every_replica() -> None:
    async with cluster_of() as (llm, client):
        answer = await client.post("/kv/warm", json={"prompt": PROMPT * 2})
        assert answer.status_code == 200, answer.text
        warm = answer.json()
        assert warm["tokens"] == 2 * len(PROMPT) and warm["cached_tokens"] == 0 and warm["pinned_tokens"] > 0
        await llm.caught_up()
        kv = (await client.get("/kv")).json()
        assert [each["pins"] for each in kv["replicas"].values()] == [1, 1]
        (line,) = kv["details"]["pins"]["prefixes"]
        assert line["id"] == warm["id"] and sorted(line["replicas"]) == sorted(llm.local.names)
        again = (await client.post("/kv/warm", json={"prompt": PROMPT * 2})).json()
        assert again["id"] == warm["id"] and again["cached_tokens"] > 0
        assert (await client.delete(f"/kv/warm/{warm['id']}")).status_code == 204
        assert (await client.delete(f"/kv/warm/{warm['id']}")).status_code == 404
        await llm.caught_up()
        assert (await client.get("/kv")).json()["pins"] == 0


async def test_a_replica_that_is_lost_while_a_prefix_is_warmed_is_named() -> None:
    async with cluster_of(latency_ms=100) as (llm, client):
        asking = asyncio.ensure_future(client.post("/kv/warm", json={"prompt": PROMPT * 20}))
        lost = llm.local.names[0]
        await until(lambda: all(member.jobs for member in llm.local.members.values()))
        await llm.local.kill(lost)
        answer = await asking
        assert answer.status_code == 503
        assert f"on 1 of 2 replicas, not on {lost}: " in answer.json()["error"]["message"]


async def test_each_replica_warms_itself_before_it_takes_requests() -> None:
    async with cluster_of(1, kv={"warm": [{"prompt": PROMPT}]}) as (llm, client):
        assert (await complete(client, PROMPT + "And then?"))["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        name = await llm.add_replica()
        await llm.caught_up()
        assert (await client.get("/kv")).json()["replicas"][name]["pins"] == 1


# -- keys ----------------------------------------------------------------------------------------------------------


def test_a_keys_limit_is_divided_among_the_servers(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key = add_key(path, "ann", 5).encode()
    config = ServerConfig(api_keys=path)
    for servers, limit in ((1, 5), (2, 3), (5, 1), (50, 1)):
        caller = Tenants(config, servers=servers).find(key)
        assert caller is not None and caller.limit == limit


async def test_what_a_key_used_is_counted_where_it_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key = add_key(path, "ann", 2)
    config = config_of(server={"api_keys": str(path)})
    async with LocalCluster(config, replicas=2) as llm:
        transport = httpx.ASGITransport(app=create_app(llm, config, servers=2))
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            await complete(client)
            found = await samples(client)
    assert found["cllm:key_generation_tokens_total", frozenset({("key", "ann")})] == 4
