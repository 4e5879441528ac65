"""A model that is unloaded and asked for again: what it computed is on disk, and answers are the same to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cllm.config import load_config
from cllm.errors import ConfigError, ShuttingDownError
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.served import ServedModel, ServedModels
from cllm.server.app import create_app
from native_disk import EXACT, SETTINGS, prompt, slow
from native_kit import write_model
from served_models import complete, config, serving, states


@asynccontextmanager
async def native(
    directory: Path, entries: list[Any], **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, ServedModels]]:
    flags = {**SETTINGS, "backend.type": "native", "models": entries, "resources.max_memory_mb": 64.0}
    del flags["resources.kv_cache_max_memory_mb"]
    flags |= {"kv.disk.enabled": True, "kv.disk.directory": str(directory), "kv.disk.max_mb": 64}
    flags |= {key.replace("__", "."): value for key, value in settings.items()}
    several = load_config(None, flags, {}).config
    served = ServedModels(several)
    app = create_app(served, several)
    await served.start()
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            yield client, served
    finally:
        await served.shutdown(0)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(DiskTier, "compute_seconds", slow)
    return [
        str(write_model(tmp_path / f"{name}.gguf", seed=seed, context_length=2048)) for seed, name in enumerate("ab")
    ]


async def until(what: Callable[[], object]) -> None:
    while not what():
        await asyncio.sleep(0.001)


async def answer(served: ServedModels, model: ServedModel, tokens: list[int]) -> tuple[list[Any], int]:
    """Tokens with the logarithms of their probabilities, and how much of the prompt was cached."""
    llm = await served.acquire(model)
    try:
        generation = llm.submit(tokens, EXACT)
        deltas = [delta async for delta in generation]
        assert all(delta.logprobs is not None for delta in deltas)
        found = [each for delta in deltas for each in zip(delta.token_ids, delta.logprobs or [], strict=True)]
        return found, generation.cached_tokens
    finally:
        model.release()


async def test_what_was_cached_is_there_after_waking(tmp_path: Path, paths: list[str]) -> None:
    async with native(tmp_path / "kv", paths) as (_, served):
        a, b = served.models
        first = {model.name: await answer(served, model, prompt(1)) for model in (a, b)}
        assert first["a"][0] != first["b"][0], "they are two models"
        await asyncio.gather(*(served.unload(model) for model in (a, b)))
        for model in (a, b):
            assert model.state == "unloaded"
            again, cached = await answer(served, model, prompt(1))
            assert (again, cached, model.loads) == (first[model.name][0], 688, 2)
            assert model.llm is not None and model.llm.executor.kv()["disk"]["loaded_tokens"] == 688
        served.memories["cpu"].ledger.check()


async def test_what_is_not_worth_a_place_on_disk_is_computed_again(tmp_path: Path, paths: list[str]) -> None:
    async with native(tmp_path / "kv", paths) as (_, served):
        model = served.models[0]
        short, _ = await answer(served, model, prompt(1, length=200))
        await served.unload(model)
        assert await answer(served, model, prompt(1, length=200)) == (short, 0)


async def test_memory_that_another_model_needs_goes_to_disk_first(tmp_path: Path, paths: list[str]) -> None:
    """Under a budget for one they take each other's place, again and again."""
    entries = [{"name": path, "load": "first_use"} for path in paths]
    probe = ServedModels(load_config(None, {**SETTINGS, "backend.type": "native", "models": entries}, {}).config)
    needed = max(probe.memories["cpu"].fixed(each) + 1.5 * each.estimate.context_bytes for each in probe.models)
    async with native(tmp_path / "kv", entries, resources__max_memory_mb=needed / 2**20) as (_, served):
        expected: dict[str, Any] = {}
        for round_number in range(3):
            for model in served.models:
                found, cached = await answer(served, model, prompt(1))
                assert expected.setdefault(model.name, found) == found
                assert cached == (688 if round_number else 0)
                served.memories["cpu"].ledger.check()
        assert [model.loads for model in served.models] == [3, 3]


async def test_models_share_one_store_with_one_limit(tmp_path: Path, paths: list[str]) -> None:
    async with native(tmp_path / "kv", paths, kv__disk__max_mb=0.5) as (client, served):
        for number in range(6):
            await asyncio.gather(*(answer(served, model, prompt(number)) for model in served.models))
        stores = {
            model.llm.executor.parts.disk.store
            for model in served.models
            if model.llm and model.llm.executor.parts.disk
        }
        assert len(stores) == 1
        metrics = (await client.get("/metrics")).text.splitlines()
        assert [line for line in metrics if line.startswith("cllm:kv_disk_limit_bytes")] == [
            "cllm:kv_disk_limit_bytes 524288.0"
        ]
        for model in served.models:
            await served.unload(model)
        size = sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*.kv"))
        assert 0 < size <= 0.5 * 2**20
        assert len(list((tmp_path / "kv").glob("*/*.kv"))) >= 1
        assert await states(client) == {"a": "unloaded", "b": "unloaded"}
    (store,) = stores
    assert store.closed


def test_one_directory_has_one_limit() -> None:
    own = {"name": "b", "kv": {"disk": {"max_mb": 10.0}}}
    with pytest.raises(ConfigError, match=r"^kv.disk.max_mb is 2048 for a and 10 for b, which keep K/V in the same"):
        ServedModels(config("a", own))
    ServedModels(config("a", {"name": "b", "kv": {"disk": {"max_mb": 10.0, "directory": "/nowhere"}}}))


async def test_who_waits_for_memory_and_then_for_the_disk_sleeps_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskTier, "compute_seconds", slow)
    own = {"name": "a", "backend": {"fake": {"latency_ms": 5.0}}, "kv": {"disk": {"enabled": False}}}
    disk = {"kv__disk__enabled": True, "kv__disk__directory": str(tmp_path)}
    async with serving(own, "b", resources__max_memory_mb=74 / 1024, **disk) as (client, served):
        a, b = served.models
        long = "x" * 3900
        before = (await complete(client, "b", long)).json()
        await served.unload(b)
        await served.load(b)
        running = [
            asyncio.create_task(complete(client, "a", f"{n}{long}", max_tokens=60, ignore_eos=True)) for n in "12"
        ]
        await until(lambda: a.llm is not None and a.llm.executor.snapshot().generated_tokens >= 2)
        assert b.llm is not None and b.account is not None
        kv, tries = b.llm.executor.parts.scheduler.kv, 0
        fetch = kv.fetch

        def counted(sequence: Any) -> bool:
            nonlocal tries
            tries += 1
            return fetch(sequence)

        kv.fetch = counted  # type: ignore[method-assign]
        waiting = asyncio.create_task(complete(client, "b", long))
        await until(lambda: b.account is not None and b.account.is_entitled)
        assert kv.loading == 0 and not any(each.done() for each in running)
        after = (await waiting).json()
        assert after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= 3800
        assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}
        assert tries < 100, "it looks when there is something new, not all the time"
        served.memories["cpu"].ledger.check()


async def test_unloading_while_blocks_are_read_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskTier, "compute_seconds", slow)
    disk = {"kv__disk__enabled": True, "kv__disk__directory": str(tmp_path)}
    async with serving("a", "b", **disk) as (client, served):
        b, long = served.models[1], "x" * 3900
        before = (await complete(client, "b", long)).json()["choices"]
        for _ in range(5):
            await served.unload(b)
            await served.load(b)
            assert b.llm is not None
            generation = b.llm.submit([*b.llm.text.tokenizer.encode(long), 5], EXACT)
            leaving = asyncio.create_task(generation.__anext__())
            await asyncio.sleep(0)  # nobody has a lease: it goes on with the load under way
            await served.unload(b)
            with pytest.raises((ShuttingDownError, StopAsyncIteration)):
                while True:
                    await leaving
                    leaving = asyncio.create_task(generation.__anext__())
        assert (await complete(client, "b", long)).json()["choices"] == before
        served.memories["cpu"].ledger.check()


# -- warm prefixes and pins ----------------------------------------------------------------------------------------


async def pins_of(client: httpx.AsyncClient, model: str) -> list[tuple[str, int]]:
    found = (await client.get(f"/kv?model={model}")).json()["details"]["pins"]["prefixes"]
    return [(pin["source"], pin["tokens"]) for pin in found]


async def test_a_model_is_warmed_when_it_is_loaded() -> None:
    entries = ["a", {"name": "b", "load": "first_use", "kv": {"warm": ["w" * 64], "warm_before_ready": True}}]
    async with serving(*entries) as (client, _):
        assert (await complete(client, "a", "w" * 80)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        asked = (await complete(client, "b", "w" * 80)).json()
        assert asked["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        assert await pins_of(client, "b") == [("warm", 64)]
        assert await pins_of(client, "a") == []


async def test_pins_end_with_their_model_and_those_of_the_configuration_come_back() -> None:
    entries = ["a", {"name": "b", "kv": {"warm": ["w" * 64], "warm_before_ready": True}}]
    async with serving(*entries) as (client, _):
        warmed = await client.post("/kv/warm", json={"model": "b", "prompt": "v" * 64})
        assert warmed.status_code == 200, warmed.text
        assert sorted(await pins_of(client, "b")) == [("warm", 64), ("warm", 64)]
        assert await pins_of(client, "a") == []
        await client.post("/models/unload", json={"model": "b"})
        gone = await client.get("/kv?model=b")
        assert gone.status_code == 409 and "pins are gone" in gone.json()["error"]["message"]
        ended = await client.delete(f"/kv/warm/{warmed.json()['id']}?model=b")
        assert (ended.status_code, ended.json()["error"]["code"]) == (409, "model_not_loaded")
        await client.post("/models/load", json={"model": "b"})
        assert await pins_of(client, "b") == [("warm", 64)]


async def test_warming_a_model_that_sleeps_loads_it() -> None:
    async with serving("a", {"name": "b", "load": "first_use"}) as (client, served):
        warmed = await client.post("/kv/warm", json={"model": "b", "prompt": "v" * 64})
        assert (warmed.status_code, served.models[1].loads, served.models[1].users) == (200, 1, 0)
        assert (await client.post("/kv/warm", json={"model": "c", "prompt": "v"})).status_code == 404


async def test_warming_that_fails_does_not_keep_a_model_from_loading() -> None:
    entries = ["a", {"name": "b", "kv": {"warm": [{"file": "/nowhere/at/all"}], "warm_before_ready": True}}]
    async with serving(*entries) as (client, _):
        assert (await complete(client, "b")).status_code == 200


async def test_a_model_that_is_being_warmed_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = asyncio.Event()
    began = asyncio.Event()

    async def warms(*args: Any) -> None:
        began.set()
        await ends.wait()

    monkeypatch.setattr("cllm.server.state.warm_up", warms)
    monkeypatch.setattr("cllm.served.models.IDLE_CHECK_S", 0.001)
    entry = {"name": "a", "unload_after_s": 0.002}
    async with serving(entry, "b", kv__warm_before_ready=False) as (_, served):
        await began.wait()
        await asyncio.sleep(0.05)
        assert served.models[0].state == "ready"
        ends.set()
        await until(lambda: served.models[0].state == "unloaded")
