"""Ollama's API: lines of JSON, whole answers, and errors in its form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

import cllm
from cllm.config import load_config
from cllm.errors import BackendError
from cllm.generation import Generation
from cllm.llm import AsyncLLM
from cllm.server.app import create_app
from http_kit import client_for
from scripted_llm import ScriptedLLM

CHAT = {"model": "fake:latest", "messages": [{"role": "user", "content": "hi"}]}
SHORT = {"options": {"num_predict": 5, "seed": 3, "num_ctx": 2048}}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    config = load_config(None, {"backend.type": "fake"}, {}).config
    async with AsyncLLM(config) as llm:
        transport = httpx.ASGITransport(app=create_app(llm, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


def lines(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_chat_is_streamed_unless_it_is_not_to_be(client: httpx.AsyncClient) -> None:
    *pieces, last = lines(await client.post("/api/chat", json={**CHAT, **SHORT}))
    whole = (await client.post("/api/chat", json={**CHAT, **SHORT, "stream": False})).json()
    assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"] != ""
    assert not any(piece["done"] for piece in pieces)
    for end in (last, whole):
        assert (end["done"], end["done_reason"], end["eval_count"], end["model"]) == (True, "length", 5, "fake")
        assert end["prompt_eval_count"] > 5


async def test_durations_are_the_engine_s_whether_streamed_or_not(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Generation, "_note_time", lambda self, now: self.timings.__init__(1.5, 2.0, 3.5))
    *_, last = lines(await client.post("/api/chat", json={**CHAT, **SHORT}))
    whole = (await client.post("/api/chat", json={**CHAT, **SHORT, "stream": False})).json()
    for end in (last, whole):
        found = [end[f"{name}_duration"] for name in ("prompt_eval", "eval", "total")]
        assert found == [1_500_000_000, 2_000_000_000, 3_500_000_000]


@pytest.mark.parametrize("raw", [None, False, True])
async def test_a_format_is_followed(client: httpx.AsyncClient, raw: bool | None) -> None:
    path, body = ("/api/chat", CHAT) if raw is None else ("/api/generate", {"model": "fake", "prompt": "x", "raw": raw})
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    options = {"options": {"repeat_penalty": 1.1, "seed": 1}, "stream": False}
    whole = (await client.post(path, json={**body, **options, "format": schema})).json()
    text = whole["response"] if raw is not None else whole["message"]["content"]
    assert json.loads(text) in ({"a": 1}, {"a": 2})
    begun = (await client.post(path, json={**body, "options": {"num_predict": 3}, "format": "json"})).text
    assert json.loads(begun.splitlines()[0]).get("response", "{").startswith("{")
    refused = await client.post(path, json={**body, "format": {"not": {}}})
    assert refused.status_code == 400 and "format" in refused.json()["error"]


async def test_a_prompt_is_answered_as_a_chat_or_raw(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "prompt": "hi", "stream": False, **SHORT}
    plain = (await client.post("/api/generate", json=body)).json()
    with_system = (await client.post("/api/generate", json={**body, "system": "Be kind."})).json()
    raw = (await client.post("/api/generate", json={**body, "raw": True})).json()
    assert raw["prompt_eval_count"] == 2 < plain["prompt_eval_count"] < with_system["prompt_eval_count"]
    openai = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 5, "seed": 3})
    assert raw["response"] == openai.json()["choices"][0]["text"]
    loads = (await client.post("/api/generate", json={"model": "fake"})).json()
    assert (loads["done"], loads["done_reason"], loads["response"]) == (True, "load", "")


async def test_what_there_is(client: httpx.AsyncClient) -> None:
    (model,) = (await client.get("/api/tags")).json()["models"]
    assert model["name"] == model["model"] == "fake"
    shown = (await client.post("/api/show", json={"model": model["name"]})).json()
    assert (shown["capabilities"], shown["model_info"]["fake.context_length"]) == (["completion"], 4096)
    assert (await client.get("/api/version")).json() == {"version": cllm.__version__}


async def test_errors_are_a_message(client: httpx.AsyncClient) -> None:
    for change, status, said in (
        ({"model": "gpt-9"}, 404, "'gpt-9' does not exist"),
        ({"tools": [{}]}, 400, "tools is not supported"),
        ({"options": {"mirostat": 2}}, 400, "options.mirostat is not supported"),
        ({"options": {"temperature": -1}}, 400, "options.temperature is -1.0"),
    ):
        refused = await client.post("/api/chat", json={**CHAT, **change})
        assert refused.status_code == status
        assert said in refused.json()["error"]


async def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    llm = ScriptedLLM(failure=BackendError("it broke"), fail_after=2)
    async with client_for(llm) as client:
        found = lines(await client.post("/api/chat", json={**CHAT, "model": "tiny"}))
    assert found[-1] == {"error": "it broke"}
    assert len(found) == 3
