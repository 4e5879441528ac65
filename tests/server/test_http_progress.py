"""What streams say while they have nothing to say, and `/v1/requests`: who runs, who waits, and an end to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI

from cllm.config import Config, load_config
from cllm.llm import AsyncLLM
from cllm.server.auth.key_file import add_key
from http_kit import TrackedApp, served
from thorough import slow

LONG = "x" * 600
PATHS = {
    "/v1/completions": {"prompt": LONG, "stream": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "stream": True},
    "/generate_stream": {"prompt": LONG},
    "/v1/responses": {"input": LONG, "stream": True},
}
SLOW = {"backend.fake.latency_ms": 100.0, "scheduler.max_step_tokens": 64}


def config(**settings: Any) -> Config:
    flags = {key.replace("__", "."): value for key, value in settings.items()}
    return load_config(None, {"backend.type": "fake", **flags}, {}).config


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[TrackedApp, AsyncLLM]]:
    async with AsyncLLM(config(**settings)) as llm, served(llm) as app:  # type: ignore[arg-type]
        yield app, llm


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(":")]


@pytest.mark.parametrize("path", PATHS)
async def test_a_prompt_says_how_far_it_is(path: str) -> None:
    async with serving(**SLOW) as (app, _), httpx.AsyncClient(base_url=app.url, timeout=60) as client:
        most = "max_output_tokens" if "responses" in path else "max_tokens"
        body = {**PATHS[path], most: 2, "return_progress": True, "ignore_eos": True}
        answer = await client.post(path, json=body)
        again = await client.post(path, json=body)
    all_events = [event for event in events(answer.text) if event.get("type") != "response.created"]
    told = [event["prompt_progress"] for event in all_events if "prompt_progress" in event]
    assert [set(each) for each in told] == [{"total", "cache", "processed", "time_ms"}] * len(told)
    processed = [each["processed"] for each in told]
    assert (processed[0], told[0]["cache"]) == (0, 0)
    assert processed == sorted(set(processed))
    assert processed[-1] == told[-1]["total"] >= 600
    assert any(0 < each < told[-1]["total"] for each in processed)
    first_text = next(n for n, event in enumerate(all_events) if "prompt_progress" not in event)
    assert first_text == len(told)
    told_again = [event["prompt_progress"] for event in events(again.text) if "prompt_progress" in event]
    assert told_again[0]["processed"] == told_again[0]["cache"] == told_again[-1]["cache"] > 0
    assert told_again[-1]["processed"] == told_again[-1]["total"] > told_again[0]["processed"]


async def test_nobody_gets_progress_who_did_not_ask() -> None:
    async with serving(**SLOW) as (app, _), httpx.AsyncClient(base_url=app.url, timeout=60) as client:
        answer = await client.post("/v1/completions", json=PATHS["/v1/completions"])
    assert "prompt_progress" not in answer.text
    assert not comments(answer.text)


async def test_openais_client_takes_progress_for_empty_chunks() -> None:
    async with serving(**SLOW) as (app, _), AsyncOpenAI(base_url=f"{app.url}/v1", api_key="-") as client:
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": LONG}],
            stream=True,
            max_tokens=3,
            extra_body={"return_progress": True, "ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
    told = [chunk for chunk in chunks if (chunk.model_extra or {}).get("prompt_progress")]
    assert told
    assert all(chunk.choices[0].delta.content is None for chunk in told)
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices[0].delta.role] == ["assistant"]


async def test_responses_report_progress_in_events_that_openais_client_knows() -> None:
    async with serving(**SLOW) as (app, _), AsyncOpenAI(base_url=f"{app.url}/v1", api_key="-") as client:
        stream = await client.responses.create(
            model="fake", input=LONG, stream=True, max_output_tokens=2, extra_body={"return_progress": True}
        )
        seen = [event async for event in stream]
    assert [event.sequence_number for event in seen] == [*range(len(seen))]
    told = [event for event in seen if (event.model_extra or {}).get("prompt_progress")]
    assert {event.type for event in told} == {"response.in_progress"}
    assert [event.type for event in seen].count("response.created") == 1


@slow
async def test_silence_is_filled_with_comments_in_the_queue_the_prompt_and_the_answer() -> None:
    settings = {"server__sse_keepalive_s": 0.2, "backend__fake__latency_ms": 700.0, "scheduler__max_running": 1}
    async with serving(**settings) as (app, _), httpx.AsyncClient(base_url=app.url, timeout=60) as client:
        body = {"prompt": "hello", "stream": True, "max_tokens": 3, "ignore_eos": True, "temperature": 0}
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.sleep(0.1)
        waiting = await client.post("/v1/completions", json={**body, "prompt": "other"})
        first = await running
    assert ": 0 of 5 prompt tokens" in comments(first.text)
    assert ": keep-alive" in comments(first.text)
    assert ": 0 of 5 prompt tokens" in comments(waiting.text)
    for answer in (first, waiting):
        assert events(answer.text)[-1]["choices"][0]["finish_reason"] == "length"
        assert answer.text.endswith("data: [DONE]\n\n")


async def test_keepalives_can_be_switched_off() -> None:
    settings = {"server__sse_keepalive_s": 0, "backend__fake__latency_ms": 300.0}
    async with serving(**settings) as (app, _), httpx.AsyncClient(base_url=app.url, timeout=60) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hello", "stream": True, "max_tokens": 2})
    assert not comments(answer.text)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_is_in_every_event_if_asked_for(path: str) -> None:
    body = {"prompt": "hi"} if "chat" not in path else {"messages": [{"role": "user", "content": "hi"}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**body, "stream": True, "max_tokens": 6, "ignore_eos": True, "stream_options": options}
    slow = serving(backend__fake__latency_ms=20.0)
    async with slow as (app, _), httpx.AsyncClient(base_url=app.url, timeout=60) as client:
        usages = [event["usage"] for event in events((await client.post(path, json=asked)).text)]
    assert all(each["prompt_tokens"] > 0 for each in usages)
    generated = [each["completion_tokens"] for each in usages]
    assert generated == sorted(generated)
    assert (generated[0] < 6, generated[-1]) == (True, 6)


# -- /v1/requests --------------------------------------------------------------------------------------------------


async def listed(client: httpx.AsyncClient, count: int, **options: Any) -> list[dict[str, Any]]:
    """What there is once there are so many."""
    while True:
        found: list[dict[str, Any]] = (await client.get("/v1/requests", **options)).json()["data"]
        if len(found) == count:
            return found
        await asyncio.sleep(0.01)


ENDLESS = {"prompt": "hello", "max_tokens": 1000, "ignore_eos": True}


async def test_what_runs_and_waits_is_listed() -> None:
    settings = {"backend__fake__latency_ms": 20.0, "scheduler__max_running": 1}
    async with serving(**settings) as (app, _), httpx.AsyncClient(base_url=app.url, timeout=60) as client:
        assert (await client.get("/v1/requests")).json() == {"object": "list", "data": []}
        tasks = [asyncio.create_task(client.post("/v1/completions", json={**ENDLESS, "priority": n})) for n in (0, 5)]
        while True:
            found = await listed(client, 2)
            if found[0]["generated_tokens"]:
                break
        assert [each["state"] for each in found] == ["running", "waiting"]
        assert [each["priority"] for each in found] == [0, 5]
        assert [each["computed_tokens"] for each in found] == [5, 0]
        assert all(each["prompt_tokens"] == 5 and each["age_s"] > 0 and each["model"] == "fake" for each in found)
        for each in found:
            ended = await client.delete(f"/v1/requests/{each['id']}")
            assert ended.json() == {"id": each["id"], "object": "request", "deleted": True}
        answers = await asyncio.gather(*tasks)
        assert [answer.status_code for answer in answers] == [499, 499]
        assert [answer.json()["error"]["code"] for answer in answers] == ["cancelled", "cancelled"]
        assert await listed(client, 0) == []
        again = await client.delete(f"/v1/requests/{found[0]['id']}")
        assert (again.status_code, again.json()["error"]["code"]) == (404, "request_not_found")


async def test_a_request_of_several_prompts_ends_as_one() -> None:
    async with serving(backend__fake__latency_ms=20.0) as (app, llm):
        async with httpx.AsyncClient(base_url=app.url, timeout=60) as client:
            body = {**ENDLESS, "prompt": ["one", "two"]}
            task = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-request-id": "mine"}))
            found = await listed(client, 2)
            whole = found[0]["id"].removesuffix("-0")
            assert found[1]["id"] == f"{whole}-1"
            for unknown in ("min", "ine", whole[:-1], f"{whole}-2"):
                assert (await client.delete(f"/v1/requests/{unknown}")).status_code == 404
            assert (await client.delete(f"/v1/requests/{whole}")).status_code == 200
            assert (await task).status_code == 499
        assert llm.requests() == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("own", ["mine", "order-7-12", None])
async def test_a_request_ends_by_what_x_request_id_says(path: str, own: str | None) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hello", "max_tokens": 1000},
        "/v1/responses": {"input": "hello", "max_output_tokens": 1000},
    }
    body = bodies.get(path, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1000})
    more = {"model": "fake", "stream": True, "ignore_eos": True}
    headers = {} if own is None else {"x-request-id": own}
    async with serving(backend__fake__latency_ms=20.0) as (app, llm):
        async with (
            httpx.AsyncClient(base_url=app.url, timeout=60) as client,
            client.stream("POST", path, json=body | more, headers=headers) as answer,
        ):
            asked = answer.headers["x-request-id"]
            assert own is None or asked == own
            assert (await client.delete(f"/v1/requests/{asked}")).json()["id"] == asked
            assert "was ended by DELETE" in (await answer.aread()).decode()
        assert llm.requests() == []


async def test_openais_client_is_told_of_the_end_and_does_not_try_again() -> None:
    async with serving(backend__fake__latency_ms=20.0) as (app, llm):
        async with (
            AsyncOpenAI(base_url=f"{app.url}/v1", api_key="-", max_retries=2) as client,
            httpx.AsyncClient(base_url=app.url) as other,
        ):
            options: Any = {"model": "fake", "prompt": "hello", "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
            stream = await client.completions.create(**options, stream=True)
            with pytest.raises(APIError, match="was ended by DELETE"):
                async for chunk in stream:
                    await other.delete(f"/v1/requests/{chunk.id}")
            whole = asyncio.create_task(client.completions.create(**options))
            await other.delete(f"/v1/requests/{(await listed(other, 1))[0]['id']}")
            with pytest.raises(APIStatusError, match="was ended by DELETE"):
                await whole
        assert llm.requests() == []


async def test_a_key_sees_and_ends_its_own_requests_only(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = {name: {"authorization": f"Bearer {add_key(path, name, None)}"} for name in ("ann", "bob")}
    operator = {"authorization": "Bearer sesame"}
    settings = {"server__api_keys": str(path), "server__api_key": "sesame", "backend__fake__latency_ms": 20.0}
    async with serving(**settings) as (app, _), httpx.AsyncClient(base_url=app.url, timeout=60) as client:
        tasks = [asyncio.create_task(client.post("/v1/completions", json=ENDLESS, headers=keys[k])) for k in keys]
        everything = await listed(client, 2, headers=operator)
        assert {each["key"] for each in everything} == {"ann", "bob"}
        anns = await listed(client, 1, headers=keys["ann"])
        assert anns[0]["key"] == "ann"
        assert (await client.get("/v1/requests")).status_code == 401
        stolen = await client.delete(f"/v1/requests/{anns[0]['id']}", headers=keys["bob"])
        assert stolen.status_code == 404
        assert (await client.delete(f"/v1/requests/{anns[0]['id']}", headers=keys["ann"])).status_code == 200
        bobs = await listed(client, 1, headers=operator)
        assert (await client.delete(f"/v1/requests/{bobs[0]['id']}", headers=operator)).status_code == 200
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [499, 499]
