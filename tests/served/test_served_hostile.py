"""Several models when things go wrong: files that change, loads that fail, clients that leave, the server's end."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

import cllm.executor
from cllm.config import load_config
from cllm.errors import ModelUnavailableError, ShuttingDownError
from cllm.llm import AsyncLLM
from cllm.loading.parts import ModelParts
from cllm.served import ServedModels, models
from cllm.server.errors import problem_of
from native_kit import write_model
from served_models import complete, config, serving, states

SLOW = {"fake": {"latency_ms": 5.0}}
LAZY = {"load": "first_use"}


async def until(what: Any) -> None:
    while not what():
        await asyncio.sleep(0.001)


class Gate:
    """Loads wait at it, in their threads, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Exception | None = None) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        load_model = cllm.executor.load_model

        def waiting(*args: Any) -> ModelParts:
            self.reached.set()
            assert self.opened.wait(30)
            if fails is not None:
                raise fails
            return load_model(*args)

        monkeypatch.setattr(cllm.executor, "load_model", waiting)


# -- room ----------------------------------------------------------------------------------------------------------

ONE = 48 / 1024
"""MiB: a budget for one context of 4,096 tokens."""


async def test_two_who_ask_for_two_models_under_a_budget_for_one_are_both_answered() -> None:
    entries = [{"name": name, **LAZY, "backend": SLOW} for name in "ab"]
    async with serving(*entries, resources__max_memory_mb=ONE) as (client, served):
        for _ in range(3):
            answers = await asyncio.gather(
                *(complete(client, name, f"{number}", ignore_eos=True) for number in range(4) for name in "ab")
            )
            assert [answer.status_code for answer in answers] == [200] * 8, answers
        served.memories["cpu"].ledger.check()
        assert [each.waiting for each in served.models] == [0, 0]


async def test_two_loads_by_hand_under_a_budget_for_one_both_end() -> None:
    entries = [{"name": name, **LAZY} for name in "ab"]
    async with serving(*entries, resources__max_memory_mb=ONE) as (client, served):
        loads = await asyncio.gather(*(client.post("/models/load", json={"model": name}) for name in "ab"))
        assert [load.status_code for load in loads] == [200, 200]
        assert sorted((await states(client)).values()) == ["ready", "unloaded"]
        served.memories["cpu"].ledger.check()


async def test_who_waits_for_room_longer_than_its_own_time_is_told_for_what() -> None:
    entries = [{"name": name, **LAZY, "backend": SLOW} for name in "ab"]
    async with serving(*entries, resources__max_memory_mb=ONE) as (client, served):
        running = asyncio.create_task(complete(client, "a", max_tokens=300, ignore_eos=True))
        await until(lambda: served.models[0].users)
        answer = await complete(client, "b", timeout=0.2)
        assert answer.status_code == 408
        assert "b is waiting for memory that other models are using" in answer.json()["error"]["message"]
        assert (await running).json()["usage"]["completion_tokens"] == 300
        await until(lambda: served.models[1].changing is None)
        assert (await complete(client, "b")).status_code == 200


async def test_who_waits_for_room_is_refused_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "ROOM_S", 0.1)
    entries = [{"name": name, **LAZY, "backend": SLOW} for name in "ab"]
    async with serving(*entries, resources__max_memory_mb=ONE) as (client, served):
        running = asyncio.create_task(complete(client, "a", max_tokens=300, ignore_eos=True))
        await until(lambda: served.models[0].users)
        answer = await complete(client, "b")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
        assert "a (0 MiB, in use)" in answer.json()["error"]["message"] and answer.headers["retry-after"]
        assert (await running).status_code == 200


# -- loads that do not end well ------------------------------------------------------------------------------------


async def test_a_client_that_leaves_while_its_model_is_loaded_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving("a", {"name": "b", **LAZY}) as (client, served):
        gate, b = Gate(monkeypatch), served.models[1]
        leaving = asyncio.create_task(complete(client, "b"))
        await asyncio.to_thread(gate.reached.wait)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert (b.state, b.users, b.waiting) == ("loading", 0, 0)
        staying = asyncio.create_task(complete(client, "b"))
        await until(lambda: b.waiting)
        gate.opened.set()
        assert (await staying).status_code == 200
        assert (b.loads, b.users) == (1, 0)
        assert (await client.post("/models/unload", json={"model": "b"})).status_code == 200


async def test_fifty_who_wait_for_a_load_that_fails_are_all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("a", {"name": "b", **LAZY}) as (client, served):
        gate = Gate(monkeypatch, MemoryError("no memory at all"))
        asking = [asyncio.create_task(complete(client, "b", f"{number}")) for number in range(50)]
        await asyncio.to_thread(gate.reached.wait)
        await until(lambda: served.models[1].waiting == 50)
        gate.opened.set()
        answers = await asyncio.gather(*asking)
        assert {answer.status_code for answer in answers} == {503}
        assert "b could not be loaded: no memory at all" in answers[0].json()["error"]["message"]
        (card,) = [each for each in (await client.get("/v1/models")).json()["data"] if each["id"] == "b"]
        assert (card["state"], card["error"]) == ("failed", "no memory at all")
        assert [status.name for status in served.account_status()] == ["a"]
        assert (await complete(client, "a")).status_code == 200


async def test_what_fails_after_a_model_was_loaded_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("a", {"name": "b", **LAZY}) as (client, served):
        on_loaded, loaded = served.on_loaded, []

        async def fails(model: Any, llm: AsyncLLM) -> None:
            loaded.append(llm)
            raise RuntimeError("not today")

        served.on_loaded = fails
        assert (await complete(client, "b")).status_code == 503
        assert served.models[1].llm is None and not loaded[0].ready
        assert [status.name for status in served.account_status()] == ["a"]
        served.on_loaded, served.models[1].retry_at = on_loaded, 0.0
        assert (await complete(client, "b")).status_code == 200


async def test_unloading_what_is_being_loaded_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("a", {"name": "b", **LAZY}) as (_, served):
        gate, b = Gate(monkeypatch), served.models[1]
        loading = asyncio.create_task(served.load(b))
        await asyncio.to_thread(gate.reached.wait)
        unloading = asyncio.create_task(served.unload(b, wait=True))
        await asyncio.sleep(0)
        gate.opened.set()
        await asyncio.gather(loading, unloading)
        served.memories["cpu"].ledger.check()


async def test_a_model_is_unloaded_once_however_many_ask_while_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with serving("a", {"name": "b", **LAZY}) as (client, served):
        gate, b = Gate(monkeypatch), served.models[1]
        loading = asyncio.create_task(served.load(b))
        await asyncio.to_thread(gate.reached.wait)
        body = {"model": "b", "wait": True}
        unloading = [asyncio.create_task(client.post("/models/unload", json=body)) for _ in range(3)]
        await asyncio.sleep(0.01)
        gate.opened.set()
        answers = await asyncio.gather(*unloading)
        assert [answer.status_code for answer in answers] == [200] * 3
        await loading
        assert caplog.text.count("b unloaded") <= b.loads


async def test_who_comes_while_two_have_a_model_unloaded_finds_it_loaded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is not done before the first is, and nobody closes the account of what was loaded after that."""
    shutdown = AsyncLLM.shutdown

    async def slowly(llm: AsyncLLM, grace_s: float | None = None) -> None:
        await asyncio.sleep(0.05)
        await shutdown(llm, grace_s)

    async with serving("a", "b") as (client, served):
        a = served.models[0]
        monkeypatch.setattr(AsyncLLM, "shutdown", slowly)

        async def unload_and_ask() -> int:
            await served.unload(a)
            assert a.llm is None and a.account is None
            return (await complete(client, "a")).status_code

        _, status = await asyncio.gather(served.unload(a), unload_and_ask())
        await asyncio.sleep(0.1)
        assert (status, a.ready, a.loads) == (200, True, 2)
        assert sorted(status.name for status in served.account_status()) == ["a", "b"]
        monkeypatch.undo()


async def test_nothing_is_left_of_a_model_that_was_unloaded() -> None:
    threads = set(threading.enumerate())
    async with serving("a", "b") as (client, served):
        a, gone = served.models[0], []
        for _ in range(3):
            assert (await complete(client, "a", "long enough for a thread of its own " * 80)).status_code == 200
            assert a.llm is not None
            gone.append(weakref.ref(a.llm))
            await served.unload(a)
        for _ in range(100):  # what the event loop still has to do may hold the last one for a moment
            gc.collect()
            if not any(left() for left in gone):
                break
            await asyncio.sleep(0.05)
        assert [left() for left in gone] == [None] * 3
        new = set(threading.enumerate()) - threads
        await until(lambda: not any(thread.name.startswith("cllm-text") and thread.is_alive() for thread in new))


# -- the end -------------------------------------------------------------------------------------------------------


async def test_the_end_of_the_server_while_models_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load under way ends, those behind it do not begin, and whoever waits is told."""
    served = ServedModels(config("a", {"name": "b", **LAZY}, {"name": "c", **LAZY}))
    await served.start()
    gate = Gate(monkeypatch)
    asking = [asyncio.create_task(served.acquire(model)) for model in served.models[1:]]
    await asyncio.to_thread(gate.reached.wait)
    ending = asyncio.create_task(served.shutdown(0))
    await asyncio.sleep(0.05)
    gate.opened.set()
    await ending
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(outcomes[1], ShuttingDownError)
    assert {model.state for model in served.models} == {"unloaded"}
    assert [model.loads for model in served.models] == [1, 1, 0]
    for model in served.models:
        assert model.llm is None or not model.llm.ready
    with pytest.raises(ShuttingDownError):
        await served.load(served.models[2])


async def test_the_end_of_the_server_while_a_model_waits_for_its_requests() -> None:
    served = ServedModels(config("a", "b"))
    await served.start()
    b = served.models[1]
    await served.acquire(b)  # and is never released
    unloading = asyncio.create_task(served.unload(b, wait=True))
    await until(lambda: b.state == "unloading")
    await asyncio.wait_for(served.shutdown(0), 10)
    await unloading


# -- streams -------------------------------------------------------------------------------------------------------


async def test_streams_end_whole_before_their_model_is_unloaded() -> None:
    async with serving("a", {"name": "b", "backend": SLOW}) as (client, served):
        b = served.models[1]
        body = {"model": "b", "prompt": "x", "max_tokens": 40, "ignore_eos": True, "stream": True}

        async def stream(number: int) -> int:
            answer = await client.post("/v1/completions", json={**body, "seed": number})
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            assert events.pop() == "[DONE]"
            assert json.loads(events[-1])["choices"][0]["finish_reason"] == "length"
            return len(events)

        streams = [asyncio.create_task(stream(number)) for number in range(5)]
        await until(lambda: b.users == 5)
        assert (await client.post("/models/unload", json={"model": "b"})).status_code == 409
        unloading = asyncio.create_task(client.post("/models/unload", json={"model": "b", "wait": True}))
        await until(lambda: b.state == "unloading")
        late = [asyncio.create_task(complete(client, "b", f"{number}")) for number in range(5)]
        assert all(events >= 2 for events in await asyncio.gather(*streams))
        assert (await unloading).status_code == 200
        assert {answer.status_code for answer in await asyncio.gather(*late)} == {200}
        assert b.loads == 2


# -- files ---------------------------------------------------------------------------------------------------------


def native(*paths: Path, **more: Any) -> ServedModels:
    settings = {"backend.type": "native", "backend.threads": 1, "models": [str(path) for path in paths]}
    settings |= {"resources.max_memory_mb": 8.0, "kv.disk.enabled": False, **more}
    return ServedModels(load_config(None, settings, {}).config)


async def test_a_file_that_is_gone_is_told_and_found_again(tmp_path: Path) -> None:
    paths = [write_model(tmp_path / f"{name}.gguf", seed=seed) for seed, name in enumerate("ab")]
    served = native(*paths)
    await served.start()
    b = served.models[1]
    await served.unload(b)
    away = paths[1].rename(tmp_path / "away")
    for _ in range(2):  # who has it tried, and who comes before it is tried again
        with pytest.raises(ModelUnavailableError, match=f"b could not be loaded: no such file: {paths[1]};") as raised:
            await served.acquire(b)
        told = problem_of(raised.value, request_id="x").message
        assert told.startswith("b could not be loaded: no such file: b.gguf;") and str(tmp_path) not in told
    assert b.state == "failed" and [each.name for each in served.account_status()] == ["a"]
    away.rename(paths[1])
    b.retry_at = 0.0
    await served.acquire(b)
    b.release()
    await served.shutdown(0)


async def test_a_file_that_is_another_one_now_is_estimated_anew(tmp_path: Path) -> None:
    paths = [write_model(tmp_path / f"{name}.gguf", seed=seed) for seed, name in enumerate("ab")]
    served = native(*paths)
    await served.start()
    b = served.models[1]
    before = b.estimate
    await served.unload(b)
    write_model(tmp_path / "other", seed=7, n_layers=5).replace(paths[1])
    llm = await served.acquire(b)
    b.release()
    assert b.estimate.weights > before.weights and b.estimate.token_bytes > before.token_bytes
    assert llm.text.spec.n_layers == 5 and b.account is not None and b.account.fixed == b.estimate.weights
    await served.unload(b)
    write_model(tmp_path / "other", seed=7, n_layers=40).replace(paths[1])
    with pytest.raises(ModelUnavailableError, match=r"b needs .* one context of \d+ tokens: more than the 8 MiB"):
        await served.acquire(b)
    paths[1].write_bytes(b"GGUF and then nothing")
    b.retry_at = 0.0
    with pytest.raises(ModelUnavailableError, match="b could not be loaded"):
        await served.acquire(b)
    await served.acquire(served.models[0])
    served.models[0].release()
    await served.shutdown(0)
