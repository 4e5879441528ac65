"""What the page's stream says beside the map: the disk, pins, and what comes into the prefix tree and leaves it."""

from __future__ import annotations

import asyncio

import httpx

from cllm.engine.params import SamplingParams
from cllm.kv.events import KVEvent
from cllm.kv.paged.manager import PagedKVManager
from cllm.llm import AsyncLLM
from cllm.server.page.cache_events import MOST, short_name, summarize
from page_stream import LIMIT_S, page_of, reading, watchers_gone
from thorough import slow

A, B, C, D = (bytes([number]) * 32 for number in range(1, 5))


def stored(parent: bytes, *names: bytes) -> KVEvent:
    return KVEvent(1, "stored", names, parent)


def removed(*names: bytes) -> KVEvent:
    return KVEvent(1, "removed", names)


def test_what_follows_on_what_was_stored_is_one_entry() -> None:
    assert summarize([stored(b"", A), stored(A, B, C)]) == [
        {"kind": "stored", "blocks": 3, "parent": "", "name": short_name(C)}
    ]
    assert summarize([stored(b"", A), stored(b"", B), stored(A, C)]) == [
        {"kind": "stored", "blocks": 2, "parent": "", "name": short_name(C)},
        {"kind": "stored", "blocks": 1, "parent": "", "name": short_name(B)},
    ]


def test_what_left_is_not_gone_on_with() -> None:
    assert summarize([stored(b"", A), removed(D), removed(A), stored(A, B)]) == [
        {"kind": "stored", "blocks": 1, "parent": "", "name": short_name(A)},
        {"kind": "removed", "blocks": 2, "name": short_name(A)},
        {"kind": "stored", "blocks": 1, "parent": short_name(A), "name": short_name(B)},
    ]


def test_the_end_of_all_and_what_was_lost_are_summarized() -> None:
    assert summarize([KVEvent(3, "gap"), KVEvent(4, "cleared")]) == [{"kind": "gap"}, {"kind": "cleared"}]
    assert summarize([]) == []


def test_of_many_the_newest_are_summarized() -> None:
    names = [number.to_bytes(32, "big") for number in range(100)]
    entries = summarize([stored(A, name) for name in names])
    assert len(entries) == MOST and entries[-1]["name"] == short_name(names[-1])


@slow
async def test_the_stream_tells_every_block_that_is_stored_and_removed() -> None:
    async with page_of(resources={"kv_cache_max_memory_mb": 0.02}) as (llm, app), reading(app.url) as events:
        reader = await anext(events)
        assert "cache_events" not in reader.known
        counts = {"stored": 0, "removed": 0}
        for number in range(20):
            _ = [delta async for delta in llm.submit(f"{number} " * 100, SamplingParams(max_tokens=5))]
            while (counts["stored"], counts["removed"]) != _counted(llm):
                reader.known.pop("cache_events", None)
                reader = await asyncio.wait_for(anext(events), LIMIT_S)
                for entry in reader.known.get("cache_events", ()):
                    counts[entry["kind"]] += entry["blocks"]
        assert counts["removed"] > 0
        names = {prefix["name"] for prefix in reader.known["prefixes"]}
        assert names == {short_name(name) for name in _ends(llm)}


def _counted(llm: AsyncLLM) -> tuple[int, int]:
    kv = llm.executor.kv()
    return kv["blocks_stored"], kv["blocks_removed"]


def _ends(llm: AsyncLLM) -> list[bytes]:
    kv = llm.executor.parts.scheduler.kv
    assert isinstance(kv, PagedKVManager)
    return [node.names[-1] for node in kv.arena.prefixes.tree.nodes()]


async def test_slots_tell_the_blocks_that_their_sequences_spell() -> None:
    async with page_of(layout="slots") as (llm, app), reading(app.url) as events:
        reader = await anext(events)
        _ = [delta async for delta in llm.submit("hello " * 20, SamplingParams(max_tokens=5))]
        while "cache_events" not in reader.known:
            reader = await asyncio.wait_for(anext(events), LIMIT_S)
        assert reader.known["cache_events"][0]["kind"] == "stored"
        assert reader.known["block_tokens"] == 16 != reader.known["cell_tokens"]


async def test_pins_are_in_the_stream_by_the_number_of_their_prefix() -> None:
    for layout in ("paged", "slots"):
        async with (
            page_of(layout=layout) as (_, app),
            httpx.AsyncClient(base_url=app.url) as client,
            reading(app.url) as events,
        ):
            reader = await anext(events)
            assert reader.known["kept"]["pins"]["prefixes"] == [] and "disk" not in reader.known["kept"]
            answer = await client.post("/kv/warm", json={"prompt": "a long text " * 20, "ttl_s": 3600})
            assert answer.status_code == 200
            while not (pins := reader.known["kept"]["pins"]["prefixes"]):
                reader = await anext(events)
            (pin,) = pins
            assert (pin["id"], pin["source"]) == (answer.json()["id"], "warm")
            assert pin["prefix"] in {prefix["number"] for prefix in reader.known["prefixes"] if prefix["pins"]}
            assert (await client.get("/kv")).json()["details"]["pins"]["prefixes"][0]["prefix"] == pin["prefix"]


async def test_a_listener_goes_with_the_last_watcher() -> None:
    async with page_of() as (llm, app):
        kv = llm.executor.parts.scheduler.kv
        assert isinstance(kv, PagedKVManager)
        listeners = kv.arena.events._listeners
        async with reading(app.url) as events:
            await anext(events)
            assert len(listeners) == 1
        await watchers_gone(llm, app)
        assert len(listeners) == 0
