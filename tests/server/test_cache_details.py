"""Why a prompt was computed though it was cached: the layers with a window had nothing there to go on from."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from page_stream import page_of

SHARED = "a beginning that two prompts have in common. " * 10
FIRST, SECOND = (SHARED + end * 200 for end in "xy")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "", "max_tokens": 2},
    "/generate": {"prompt": "", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": ""}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": ""}], "max_tokens": 2},
    "/v1/responses": {"input": "", "max_output_tokens": 2},
}


def asking(path: str, text: str, **more: Any) -> dict[str, Any]:
    body = {**BODIES[path], **more}
    for name in ("prompt", "input"):
        if name in body:
            body[name] = text
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": text}]
    return body


def found(path: str, answer: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """Cached tokens, and the details."""
    if path == "/generate":
        return answer["data"]["cached_tokens"], answer["data"]["cache_details"]
    usage = answer["usage"]
    if path == "/v1/messages":
        return usage["cache_read_input_tokens"], usage.get("cache_details")
    details = usage["prompt_tokens_details" if "prompt_tokens_details" in usage else "input_tokens_details"]
    asked = {name: details[name] for name in ("known_tokens", "computed_tokens") if name in details}
    return details["cached_tokens"], asked or None


@pytest.mark.parametrize("path", BODIES)
async def test_usage_says_what_was_known_if_it_is_asked(path: str) -> None:
    async with page_of(window=40) as (_, app), httpx.AsyncClient(base_url=app.url, timeout=60) as client:

        async def post(text: str, **more: Any) -> tuple[int, dict[str, Any] | None]:
            answer = await client.post(path, json=asking(path, text, **more))
            assert answer.status_code == 200, answer.text
            return found(path, answer.json())

        assert (await post(FIRST))[1] is None
        cached, details = await post(SECOND, return_cache_details=True)
        assert details is not None and cached < len(SHARED) // 16 * 16 <= details["known_tokens"]
        assert details["computed_tokens"] >= 200 + len(SHARED) - cached
        # Where the lookup found more than it could use, a snapshot was taken.
        cached, details = await post(SHARED + "z" * 200, return_cache_details=True)
        assert details is not None and cached == details["known_tokens"] >= len(SHARED) // 16 * 16
        kv = (await client.get("/kv")).json()
        assert kv["known_tokens"] > kv["hit_tokens"] > 0


async def test_streams_say_it_too() -> None:
    async with page_of(window=40) as (_, app), httpx.AsyncClient(base_url=app.url, timeout=60) as client:
        for text in (FIRST, SECOND):
            body = asking("/v1/completions", text, stream=True, return_cache_details=True)
            answer = await client.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}})
        # Two layers with a window of 40: so much before what is known is computed again for them.
    cached = ((448 - 39) // 16 * 16 - 39) // 16 * 16
    details = f'"cached_tokens":{cached},"known_tokens":448,"computed_tokens":{len(SECOND) - cached}'
    assert len(SHARED) // 16 * 16 == 448 and details in answer.text
