"""Several models behind one server: routing, loading once, and unloading."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from cllm.config import load_config
from cllm.errors import ModelError, ModelUnavailableError
from cllm.llm import AsyncLLM
from cllm.served import models
from cllm.server.app import create_app
from served_models import complete, serving, states

# -- routing -------------------------------------------------------------------------------------------------------


async def test_requests_go_to_the_model_they_name() -> None:
    first = {"name": "a", "aliases": ["ay", "first"]}
    second = {"name": "b", "resources": {"max_context_length": 100}}
    async with serving(first, second) as (client, served):
        for name, answers in (("ay", "ay"), ("first", "ay"), ("a", "ay"), ("b", "b"), (None, "ay")):
            answer = await complete(client, name)
            assert (answer.status_code, answer.json()["model"]) == (200, answers)
        finished = [sum(now.finished.values()) for each in served.models if (now := each.snapshot())]
        assert finished == [4, 1]
        too_long = await complete(client, "b", "x" * 200)
        assert too_long.status_code == 400
        assert (await complete(client, "a", "x" * 200)).status_code == 200


async def test_an_unknown_model_is_404_with_the_list() -> None:
    async with serving("a", "b") as (client, _):
        for answer in (
            await complete(client, "c"),
            await client.get("/kv?model=c"),
            await client.get("/v1/models/c"),
            await client.post("/models/load", json={"model": "c"}),
            await client.post("/encode", json={"model": "c", "text": "x"}),
        ):
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert error["message"] == "The model 'c' does not exist; available: 'a', 'b'."


async def test_every_endpoint_works_for_each_model() -> None:
    async with serving("a", {"name": "b", "resources": {"max_context_length": 100}}) as (client, _):
        chat = {"model": "b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert (await client.post("/v1/chat/completions", json=chat)).json()["model"] == "b"
        assert (await client.post("/generate", json={"model": "b", "prompt": "hi"})).status_code == 200
        assert (await client.post("/encode", json={"model": "b", "text": "hi"})).json()["data"]["length"] == 2
        load = {"model": "b", "requests": 2, "concurrency": 1, "max_tokens": 2, "prompt": "x"}
        assert (await client.post("/benchmark", json=load)).status_code == 200
        assert (await client.get("/model/info?model=b")).json()["data"]["context_length"] == 100
        assert (await client.get("/model/info")).json()["data"]["context_length"] == 4096
        assert (await client.get("/kv?model=b")).json()["query_tokens"] > 0
        assert (await client.get("/kv")).json()["query_tokens"] == 0
        metrics = (await client.get("/metrics")).text
        assert metrics.count("# TYPE cllm:num_requests_running gauge") == 1
        assert 'cllm:request_success_total{finished_reason="length",model_name="b"}' in metrics
        assert 'cllm:num_requests_running{model_name="a"} 0.0' in metrics
        assert 'cllm:memory_budget_bytes{device="cpu"} 1.048576e+06' in metrics
        assert (await client.get("/health")).json() == {"status": "ok", "model_loaded": True, "model": "a"}
        assert "/models/load" in (await client.get("/openapi.json")).json()["paths"]


async def test_what_all_models_take_is_shown_whichever_is_loaded() -> None:
    async with serving("a", "b") as (client, served):
        for loaded in ("a", "b", None):
            seen = (await client.get("/kv")).json()
            assert seen["model"] == loaded and seen["models"]["budget_bytes"] == 2**20
            assert [each["name"] for each in seen["models"]["models"]] == ["a", "b"]
            assert ("total" in seen) is (loaded is not None)
            if loaded is not None:
                await served.unload(served.find(loaded) or served.default)
        described = (await client.get("/openapi.json")).json()["paths"]
        for path in ("/kv", "/model/info"):
            assert (await client.get(f"{path}?model=a")).status_code == 409
            assert "409" in described[path]["get"]["responses"]


async def test_one_model_has_no_endpoints_of_several() -> None:
    single = load_config(None, {"backend.type": "fake"}, {}).config
    async with AsyncLLM(single) as llm:
        transport = httpx.ASGITransport(app=create_app(llm, single))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.post("/models/load", json={"model": "fake"})).status_code == 404
            (card,) = (await client.get("/v1/models")).json()["data"]
            assert set(card) == {"id", "object", "created", "owned_by", "max_model_len"}
            assert "memory_budget" not in (await client.get("/metrics")).text


# -- loading and unloading -----------------------------------------------------------------------------------------


async def test_fifty_who_ask_for_a_model_that_is_not_loaded_load_it_once() -> None:
    async with serving("a", {"name": "b", "load": "first_use"}) as (client, served):
        assert await states(client) == {"a": "ready", "b": "unloaded"}
        assert (await client.get("/ready")).status_code == 200
        answers = await asyncio.gather(*(complete(client, "b", f"hello {number}") for number in range(50)))
        assert {answer.status_code for answer in answers} == {200}
        assert served.models[1].loads == 1
        assert await states(client) == {"a": "ready", "b": "ready"}


async def test_loading_and_unloading_by_hand() -> None:
    async with serving("a", {"name": "b", "load": "first_use"}) as (client, served):
        loaded = await client.post("/models/load", json={"model": "b"})
        assert (loaded.status_code, loaded.json()["state"]) == (200, "ready")
        unloaded = await client.post("/models/unload", json={"model": "b"})
        assert (unloaded.status_code, unloaded.json()["state"], unloaded.json()["kv_bytes"]) == (200, "unloaded", 0)
        assert (await client.get("/kv?model=b")).json()["error"]["code"] == "model_not_loaded"
        assert (await complete(client, "b")).status_code == 200
        assert served.models[1].loads == 2
        assert (await client.post("/models/load", json={})).status_code == 400


async def test_unloading_while_requests_run_is_refused_or_waits() -> None:
    async with serving("a", {"name": "b", "backend": {"fake": {"latency_ms": 5.0}}}) as (client, served):
        running = asyncio.create_task(complete(client, "b", max_tokens=40, ignore_eos=True))
        while not served.models[1].users:
            await asyncio.sleep(0.001)
        refused = await client.post("/models/unload", json={"model": "b"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_busy")
        assert "b has 1 request running" in refused.json()["error"]["message"]
        waits = await client.post("/models/unload", json={"model": "b", "wait": True})
        assert (waits.status_code, waits.json()["state"]) == (200, "unloaded")
        assert running.done() and running.result().json()["usage"]["completion_tokens"] == 40


async def test_who_comes_while_it_is_unloaded_waits_and_has_it_loaded_again() -> None:
    async with serving("a", {"name": "b", "backend": {"fake": {"latency_ms": 5.0}}}) as (client, served):
        b = served.models[1]
        running = asyncio.create_task(complete(client, "b", max_tokens=20, ignore_eos=True))
        while not b.users:
            await asyncio.sleep(0.001)
        unloading = asyncio.create_task(served.unload(b, wait=True))
        while b.state != "unloading":
            await asyncio.sleep(0.001)
        late = await complete(client, "b", timeout=30)
        assert (late.status_code, running.done(), unloading.done(), b.loads) == (200, True, True, 2)


async def test_a_request_waits_for_a_load_no_longer_than_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = asyncio.Event()

    async def never(llm: AsyncLLM) -> None:
        await blocked.wait()
        raise ModelError("it is damaged")

    async with serving("a", {"name": "b", "load": "first_use"}) as (client, served):
        monkeypatch.setattr(AsyncLLM, "start", never)
        answer = await complete(client, "b", timeout=0.05)
        assert answer.status_code == 408
        assert "b is still being loaded" in answer.json()["error"]["message"]
        assert (await complete(client, "a")).status_code == 200, "others are not held up"
        blocked.set()
        with pytest.raises(ModelUnavailableError, match="b could not be loaded: it is damaged"):
            await served.load(served.models[1])


async def test_a_model_that_cannot_be_loaded_says_why_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = AsyncLLM.start, [True]

    async def fails_once(llm: AsyncLLM) -> None:
        if failures:
            failures.pop()
            raise ModelError("b.gguf: it is damaged")
        await start(llm)

    async with serving("a", {"name": "b", "load": "first_use"}) as (client, served):
        monkeypatch.setattr(AsyncLLM, "start", fails_once)
        b = served.models[1]
        first = await complete(client, "b")
        assert (first.status_code, first.json()["error"]["code"]) == (503, "model_unavailable")
        assert first.json()["error"]["message"] == "b could not be loaded: b.gguf: it is damaged"
        assert await states(client) == {"a": "ready", "b": "failed"}
        second = await complete(client, "b")
        assert (second.status_code, second.json()["error"]["code"]) == (503, "model_unavailable")
        assert int(second.headers["retry-after"]) >= 1
        assert [status.name for status in served.account_status()] == ["a"], "nothing is left behind"
        b.retry_at = 0.0
        assert (await complete(client, "b")).status_code == 200


async def test_idle_models_are_unloaded_and_pinned_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "IDLE_CHECK_S", 0.01)
    entries = [{"name": "a", "unload_after_s": 0.01}, {"name": "b", "unload_after_s": 0.01, "pinned": True}, "c"]
    async with serving(*entries) as (client, served):
        while served.models[0].state != "unloaded":
            await asyncio.sleep(0.01)
        assert await states(client) == {"a": "unloaded", "b": "ready", "c": "ready"}
        assert (await complete(client, "a")).status_code == 200


async def test_a_model_whose_engine_gave_up_is_loaded_again() -> None:
    async with serving("a", "b") as (client, served):
        b = served.models[1]
        assert b.llm is not None and b.llm.executor.engine is not None
        await asyncio.to_thread(b.llm.executor.engine.stop, 0)
        assert not b.ready
        assert (await complete(client, "b")).status_code == 200
        assert b.loads == 2
