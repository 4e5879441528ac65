"""One conversation over the four chat APIs is one prompt, and what one has computed the others find."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from cllm.config import Config
from cllm.llm import AsyncLLM
from cllm.server.app import create_app
from http_kit import served
from scripted_chat import SPOKEN, TEMPLATE
from scripted_llm import ScriptedLLM

SYSTEM = "You are a careful assistant who answers in short sentences and never guesses."
HISTORY = [
    {"role": "user", "content": "What is the tallest mountain of the Alps, and how high is it?"},
    {"role": "assistant", "content": "Mont Blanc. It is 4,806 metres high."},
    {"role": "user", "content": "And the second?"},
]
HI = {"role": "user", "content": "hi"}
BLOCK_TOKENS = 16


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    config = Config.model_validate({"backend": {"type": "fake"}})
    llm = AsyncLLM(config)
    await llm.start()
    try:
        transport = httpx.ASGITransport(app=create_app(llm, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
    finally:
        await llm.shutdown(0)


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await client.post(path, json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def by_chat(client: httpx.AsyncClient, system: str = SYSTEM) -> tuple[int, int, str]:
    messages = [{"role": "system", "content": system}, *HISTORY]
    answer = await post(client, "/v1/chat/completions", {"messages": messages, "max_tokens": 4})
    usage = answer["usage"]
    text: str = answer["choices"][0]["message"]["content"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], text


async def by_responses(client: httpx.AsyncClient, system: str = SYSTEM) -> tuple[int, int, str]:
    answer = await post(client, "/v1/responses", {"input": HISTORY, "instructions": system, "max_output_tokens": 4})
    usage = answer["usage"]
    text: str = answer["output"][0]["content"][0]["text"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], text


async def by_messages(client: httpx.AsyncClient, system: str = SYSTEM) -> tuple[int, int, str]:
    body = {"messages": HISTORY, "system": [{"type": "text", "text": system}], "max_tokens": 4}
    answer = await post(client, "/v1/messages", body)
    usage = answer["usage"]
    text: str = answer["content"][0]["text"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"], text


@pytest.mark.parametrize("first", [by_chat, by_responses, by_messages])
async def test_what_one_api_has_computed_the_others_find(client: httpx.AsyncClient, first: Any) -> None:
    tokens, cached, text = await first(client)
    assert cached == 0
    for other in (by_chat, by_responses, by_messages):
        assert await other(client) == (tokens, (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS, text)


async def test_what_ollamas_chat_has_computed_the_others_find(client: httpx.AsyncClient) -> None:
    messages = [{"role": "system", "content": SYSTEM}, *HISTORY]
    body = {"model": "fake", "messages": messages, "stream": False, "options": {"temperature": 0, "num_predict": 4}}
    response = await client.post("/api/chat", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    tokens, text = answer["prompt_eval_count"], answer["message"]["content"]
    assert await by_chat(client) == (tokens, (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS, text)


async def test_tokens_are_counted_as_they_are_charged(client: httpx.AsyncClient) -> None:
    counted = await post(client, "/v1/messages/count_tokens", {"messages": HISTORY, "system": SYSTEM})
    tokens, cached, _ = await by_messages(client)
    assert (counted["input_tokens"], cached) == (tokens, 0)


async def test_what_changes_with_every_request_of_an_agent_is_left_out(client: httpx.AsyncClient) -> None:
    tokens, _, _ = await by_messages(client)
    for number in range(3):
        header = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch=a{number};"
        system = [{"type": "text", "text": header}, {"type": "text", "text": SYSTEM}]
        body = {"messages": HISTORY, "system": system, "max_tokens": 4}
        usage = (await post(client, "/v1/messages", body))["usage"]
        assert usage["cache_read_input_tokens"] == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


async def test_marks_pin_what_they_mark(client: httpx.AsyncClient) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"messages": HISTORY, "system": [{"type": "text", "text": SYSTEM, **mark}], "max_tokens": 4}
    first = (await post(client, "/v1/messages", body))["usage"]
    assert first["cache_creation_input_tokens"] >= len(SYSTEM) and first["cache_read_input_tokens"] == 0
    pins = (await client.get("/kv")).json()["details"]["pins"]["prefixes"]
    assert [pin["source"] for pin in pins] == ["request"] and pins[0]["tokens"] >= len(SYSTEM)
    second = (await post(client, "/v1/messages", body))["usage"]
    assert second["cache_creation_input_tokens"] == 0
    assert sum(second.values()) == sum(first.values())


async def test_a_conversation_that_is_stored_is_found_in_the_cache(client: httpx.AsyncClient) -> None:
    first = await post(client, "/v1/responses", {"input": SYSTEM * 4, "max_output_tokens": 4})
    second = await post(client, "/v1/responses", {"input": "Go on.", "previous_response_id": first["id"]})
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= len(SYSTEM) * 4


# -- what a model says, to each API and back -------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
async def test_what_a_model_says_becomes_blocks(streams: bool) -> None:
    llm = ScriptedLLM(max_context=4096, template=TEMPLATE, text=SPOKEN)
    asked: Any = {
        "model": "tiny",
        "max_tokens": 500,
        "messages": [HI],
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
    }
    async with served(llm) as app, AsyncAnthropic(base_url=app.url, api_key="unused", max_retries=0) as client:
        if streams:
            async with client.messages.stream(**asked) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(**asked)
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        thinking, text, call = message.content
        assert (thinking.thinking.strip(), text.text.strip()) == ("Hm.", "I look.")
        assert (call.name, call.input, message.stop_reason) == ("weather", {"city": "Paris"}, "tool_use")
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}
        messages = [HI, message.to_param(), {"role": "user", "content": [result]}]
        await client.messages.create(**{**asked, "messages": messages})
    sent = llm.asked[-1][0]
    assert [each["role"] for each in sent] == ["user", "assistant", "tool"]
    assert sent[1]["reasoning_content"].strip() == "Hm." and sent[1]["tool_calls"][0]["id"] == call.id
    assert sent[2]["content"] == "Rain"
    assert [tool["function"]["name"] for tool in llm.asked[-1][1].tools] == ["weather"]


@pytest.mark.parametrize("goes_on", ["with all items", "from the response"])
async def test_what_a_model_says_becomes_items(goes_on: str) -> None:
    llm = ScriptedLLM(max_context=4096, template=TEMPLATE, text=SPOKEN)
    asked: Any = {"model": "tiny", "tools": [{"type": "function", "name": "weather"}]}
    async with served(llm) as app, AsyncOpenAI(base_url=f"{app.url}/v1", api_key="unused", max_retries=0) as client:
        async with client.responses.stream(**asked, input="hi") as stream:
            response: Any = await stream.get_final_response()
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        reasoning, message, call = response.output
        assert (reasoning.content[0].text.strip(), message.content[0].text.strip()) == ("Hm.", "I look.")
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
        usage = response.usage
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
        if goes_on == "from the response":
            await client.responses.create(**asked, input=[output], previous_response_id=response.id)
        else:
            items = [item.to_dict() for item in response.output]
            await client.responses.create(**asked, input=[{"role": "user", "content": "hi"}, *items, output])
    sent = llm.asked[-1][0]
    assert [each["role"] for each in sent] == ["user", "assistant", "tool"]
    assert sent[1]["reasoning_content"].strip() == "Hm." and sent[1]["tool_calls"][0]["id"] == call.call_id
    assert sent[2]["content"] == "Rain"
