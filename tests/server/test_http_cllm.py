"""cLLM's own endpoints, operations, and the page that documents them all."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from cllm.config import Config
from cllm.errors import BackendError, InvalidRequestError, OverloadedError, ShuttingDownError
from cllm.llm import AsyncLLM
from cllm.server.app import create_app
from cllm.server.cllm.generate_schema import BenchmarkRequest, EncodeRequest, GenerateRequest
from cllm.server.errors import CLLM_PATHS
from cllm.server.openai.schema import ChatRequest, CompletionRequest
from http_kit import app_for, client_for, config_with, served
from scripted_llm import ScriptedLLM


async def post(llm: ScriptedLLM, path: str, body: dict[str, Any]) -> httpx.Response:
    async with client_for(llm) as client:
        return await client.post(path, json=body)


async def get(llm: AsyncLLM, path: str) -> httpx.Response:
    async with client_for(llm) as client:
        return await client.get(path)


async def test_generate() -> None:
    llm = ScriptedLLM()
    body = (await post(llm, "/generate", {"prompt": "four", "max_tokens": 5, "temperature": 0, "top_k": 3})).json()
    data = body["data"]
    assert body["success"] is True
    assert data["id"] == llm.generations[0].request_id
    assert (data["text"], data["finish_reason"]) == ("Hello", "length")
    assert (data["generated_tokens"], data["max_tokens"]) == (5, 5)
    assert (data["prompt_tokens"], data["cached_tokens"]) == (4, 0)
    assert data["tokens_per_second"] == pytest.approx(5 / data["response_time"])
    assert llm.generations[0].request.params.top_k == 3


async def test_generate_counts_cached_tokens() -> None:
    prompt = "a prompt of more than two blocks, sent twice"
    async with client_for(ScriptedLLM()) as client:
        for cached in (0, 32):
            data = (await client.post("/generate", json={"prompt": prompt, "max_tokens": 2})).json()["data"]
            assert (data["prompt_tokens"], data["cached_tokens"]) == (len(prompt), cached)


async def test_generate_stream() -> None:
    llm = ScriptedLLM()
    response = await post(llm, "/generate_stream", {"prompt": "hi", "max_tokens": 3, "stop": "!"})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    *events, last = map(json.loads, lines)
    assert [event["text"] for event in events] == ["H", "e", "l"]
    assert [event["token"] for event in events] == [[72], [101], [108]]
    assert [event["done"] for event in events] == [False, False, False]
    assert (last["done"], last["text"], last["generated_tokens"], last["max_tokens"]) == (True, "Hel", 3, 3)
    assert {event["id"] for event in [*events, last]} == {llm.generations[0].request_id}
    assert llm.generations[0].request.params.stop == ("!",)


async def test_encode() -> None:
    body = (await post(ScriptedLLM(), "/encode", {"text": "hé"})).json()
    assert body == {"success": True, "data": {"tokens": [104, 195, 169], "length": 3}}


@pytest.mark.single
async def test_model_info() -> None:
    llm = ScriptedLLM()
    async with client_for(llm) as client:
        data = (await client.get("/model/info")).json()["data"]
        kv = llm.executor.snapshot().kv
    assert (data["name"], data["backend"], data["architecture"]) == ("tiny", "fake", "fake")
    assert (data["context_length"], data["vocab_size"]) == (65, 320)
    assert data["kv_bytes_per_token"] == kv.bytes_per_unit // kv.unit_tokens
    assert data["kv_groups"] == [
        {"kind": "full", "layers": 1, "window": 0, "bytes_per_token": 8, "bytes_per_sequence": None}
    ]
    assert data["kv_bytes_total"] == kv.total * kv.bytes_per_unit
    assert data["sampling_defaults"]["temperature"] == 1.0
    assert data["sampling_defaults_from"]["temperature"] == "default"


# -- benchmark -----------------------------------------------------------------------------------------------------


async def test_benchmark_measures_every_request() -> None:
    llm = ScriptedLLM()
    data = (await post(llm, "/benchmark", {"requests": 7, "concurrency": 3, "max_tokens": 4})).json()["data"]
    assert (data["requests"], data["failed"], len(data["rows"])) == (7, 0, 7)
    assert [row["generated_tokens"] for row in data["rows"]] == [4] * 7
    assert data["tokens_per_second"] == pytest.approx(28 / data["duration"])
    latencies = sorted(row["latency"] for row in data["rows"])
    assert latencies[0] <= data["latency"]["p50"] <= data["latency"]["p95"] <= data["latency"]["p99"] <= latencies[-1]
    assert all(row["ttft"] <= row["latency"] for row in data["rows"])
    assert all(generation.request.params.ignore_eos for generation in llm.generations)


async def test_benchmark_keeps_to_its_concurrency() -> None:
    llm = ScriptedLLM(steps=0)
    async with client_for(llm) as client:
        asking = asyncio.ensure_future(client.post("/benchmark", json={"requests": 9, "concurrency": 3}))
        await llm.submitted.wait()
        await llm.starved.wait()
        assert len(llm.generations) == 3
        busy = await client.post("/benchmark", json={})
        assert (busy.status_code, busy.json()["error"]["code"]) == (429, "benchmark_running")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        llm.release()
        assert (await client.post("/benchmark", json={"requests": 1})).status_code == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"requests": 1001}, "requests"),
        ({"requests": 0}, "requests"),
        ({"concurrency": 65}, "concurrency"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 65}, "prompt"),
        ({"temperature": 1}, "temperature"),
    ],
)
async def test_benchmark_is_bounded(change: dict[str, Any], param: str) -> None:
    response = await post(ScriptedLLM(), "/benchmark", change)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert response.json()["success"] is False


async def test_benchmark_reports_requests_that_fail() -> None:
    llm = ScriptedLLM(failure=BackendError("it broke"), fail_after=2)
    data = (await post(llm, "/benchmark", {"requests": 3})).json()["data"]
    assert (data["failed"], data["latency"], data["requests_per_second"]) == (3, None, 0)
    assert {row["error"] for row in data["rows"]} == {"it broke"}
    overloaded = (await post(ScriptedLLM(failure=OverloadedError("full")), "/benchmark", {"requests": 2})).json()
    assert overloaded["data"]["failed"] == 2


@pytest.mark.parametrize(("failure", "status"), [(ShuttingDownError("bye"), 503), (InvalidRequestError("no"), 400)])
async def test_benchmark_ends_with_what_would_fail_every_request(failure: Exception, status: int) -> None:
    assert (await post(ScriptedLLM(failure=failure), "/benchmark", {})).status_code == status


# -- operations ----------------------------------------------------------------------------------------------------


async def test_health_is_about_the_process_and_ready_about_the_model() -> None:
    for ready in (True, False):
        llm: AsyncLLM = ScriptedLLM() if ready else AsyncLLM(config_with())
        health, readiness = await get(llm, "/health"), await get(llm, "/ready")
        assert (health.status_code, health.json()["status"], health.json()["model_loaded"]) == (200, "ok", ready)
        assert (readiness.status_code, readiness.json()) == (200 if ready else 503, {"ready": ready})


@pytest.mark.single
async def test_kv_is_what_the_engine_says() -> None:
    llm = ScriptedLLM()
    async with client_for(llm) as client:
        assert (await client.get("/kv")).json() == llm.executor.kv()


async def test_the_app_starts_and_stops_only_an_engine_that_was_not_running() -> None:
    for running in (True, False):
        llm = AsyncLLM(Config.model_validate({"backend": {"type": "fake"}}))
        if running:
            await llm.start()
        app = app_for(llm)
        async with app.router.lifespan_context(app):
            assert llm.ready
        assert llm.ready is running
        await llm.shutdown()


# -- documentation -------------------------------------------------------------------------------------------------


async def test_the_api_description_tells_the_truth() -> None:
    schema = (await get(ScriptedLLM(), "/openapi.json")).json()
    assert "ValidationError" not in json.dumps(schema)
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation["tags"], path
            assert operation["description"], path
            assert "422" not in operation["responses"], path
            if method == "post":
                errors = operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
                own = "FailureReply" if path in CLLM_PATHS else "ErrorReply"
                own = "AnthropicError" if path.startswith("/v1/messages") else own
                assert errors.endswith("OllamaError" if path.startswith("/api/") else own)
                body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                assert schema["components"]["schemas"][body]["additionalProperties"] is False
    assert "x-" not in json.dumps(schema["components"]).replace("x-request-id", "").replace("x-tools-left-out", "")
    stream = schema["paths"]["/generate_stream"]["post"]["responses"]["200"]["content"]
    assert list(stream) == ["text/event-stream"]
    (metrics,) = schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert metrics.startswith("text/plain")


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest, GenerateRequest, EncodeRequest, BenchmarkRequest])
def test_documented_examples_are_valid(model: Any) -> None:
    model.model_validate(model.model_json_schema()["example"])


async def test_the_api_key_is_documented_where_it_is_needed() -> None:
    paths = (await get(ScriptedLLM(), "/openapi.json")).json()["paths"]
    assert "security" not in paths["/v1/models"]["get"]
    app = create_app(ScriptedLLM(), config_with(api_key="secret"))
    schema = app.openapi()
    assert schema["paths"]["/v1/models"]["get"]["security"] == [{"ApiKey": []}]
    assert "security" not in schema["paths"]["/health"]["get"]
    assert schema["components"]["securitySchemes"]["ApiKey"]["scheme"] == "bearer"


async def test_the_pages_are_served() -> None:
    async with served(ScriptedLLM()) as app, httpx.AsyncClient(base_url=app.url) as client:
        for path in ("/docs", "/docs/docs.js"):
            assert (await client.get(path)).status_code == 200
