"""Anthropic's messages as its own client sees them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from cllm.dialect.deltas import Delta, ToolCallDelta, ToolCallStart
from cllm.dialect.tools import Tool
from cllm.errors import BackendError, OverloadedError
from cllm.server.anthropic import routes as routes
from cllm.server.auth.key_file import add_key
from cllm.server.errors import Problem
from cllm.server.schema.tools import NamedTool
from http_kit import client_for, config_with, served
from scripted_chat import CALLS, script
from scripted_llm import ScriptedLLM

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object"}}
CALL = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}],
}


@pytest.fixture
async def llm() -> ScriptedLLM:
    return ScriptedLLM(max_context=4096)


@pytest.fixture
async def client(llm: ScriptedLLM) -> AsyncIterator[AsyncAnthropic]:
    async with served(llm) as app, AsyncAnthropic(base_url=app.url, api_key="unused", max_retries=0) as client:
        yield client


async def post(llm: ScriptedLLM, body: dict[str, Any], path: str = "/v1/messages", **headers: str) -> Any:
    async with client_for(llm) as client:
        return await client.post(path, json={"max_tokens": 5, "messages": [USER], **body}, headers=headers)


async def refused(llm: ScriptedLLM, body: dict[str, Any], status: int = 400) -> str:
    response = await post(llm, body)
    assert response.status_code == status, response.text
    assert response.json()["type"] == "error"
    message: str = response.json()["error"]["message"]
    return message


def prompt_of(llm: ScriptedLLM) -> str:
    return "".join(map(chr, llm.generations[-1].prompt_ids))


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_a_message(client: AsyncAnthropic, llm: ScriptedLLM) -> None:
    message = await client.messages.create(model="tiny", max_tokens=5, system="Be brief.", messages=[USER])
    assert message.id == llm.generations[0].request_id and message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello"}]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert prompt_of(llm) == "<system>Be brief.<user>hi"
    again = await client.messages.create(model="tiny", max_tokens=5, system="Be brief.", messages=[USER])
    for usage, cached in ((message.usage, 0), (again.usage, 16)):
        assert usage.cache_read_input_tokens == cached and usage.cache_creation_input_tokens == 0
        assert (usage.input_tokens, usage.output_tokens) == (len(prompt_of(llm)) - cached, 5)


async def test_an_answer_that_ends_by_itself(client: AsyncAnthropic) -> None:
    message = await client.messages.create(model="tiny", max_tokens=100, messages=[USER])
    assert (message.content[0].text, message.stop_reason) == ("Hello, wörld!", "end_turn")


async def test_a_stream_gives_the_same_message(client: AsyncAnthropic) -> None:
    whole = await client.messages.create(model="tiny", max_tokens=100, messages=[USER])
    async with client.messages.stream(model="tiny", max_tokens=100, messages=[USER]) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    shown = {"content", "model", "role", "stop_reason", "stop_sequence", "type", "usage"}
    assert streamed.model_dump(include=shown) == whole.model_dump(include=shown)


async def test_events_have_names_and_the_order_of_the_api(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, routes, CALLS)
    response = await post(llm, {"stream": True})
    events = [dict(line.split(": ", 1) for line in each.splitlines()) for each in response.text.strip().split("\n\n")]
    assert [event["event"] for event in events] == [json.loads(event["data"])["type"] for event in events]
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    expected = ["message_start", "ping", start, delta, delta, delta, stop, start, delta, delta, stop]
    expected += [start, delta, delta, stop, start, delta, stop, "message_delta", "message_stop"]
    assert [event["event"] for event in events] == expected
    deltas = [json.loads(event["data"])["delta"]["type"] for event in events if event["event"] == delta]
    assert deltas == ["thinking_delta"] * 2 + ["signature_delta"] + ["text_delta"] * 2 + ["input_json_delta"] * 3


@pytest.mark.parametrize("streams", [True, False])
async def test_thinking_text_and_calls(client: AsyncAnthropic, monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    calls = script(monkeypatch, routes, CALLS)
    asked: Any = {"model": "tiny", "max_tokens": 100, "messages": [USER], "tools": [TOOL]}
    if streams:
        async with client.messages.stream(**asked) as stream:
            message = await stream.get_final_message()
    else:
        message = await client.messages.create(**asked)
    thinking, text, weather, time = message.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "Let me think.", "cllm")
    assert (text.type, text.text) == ("text", "I'll look.")
    assert (weather.type, weather.id, weather.name, weather.input) == (
        "tool_use",
        "call_1",
        "weather",
        {"city": "Paris"},
    )
    assert (time.id, time.name, time.input) == ("call_2", "time", {})
    assert message.stop_reason == "tool_use"
    usage = message.usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (8, 4, 8)
    assert calls[0].tools == [Tool("weather", "The weather.", {"type": "object"})]


async def test_thinking_that_is_not_to_be_shown(client: AsyncAnthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, routes, CALLS)
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    asked: Any = {"model": "tiny", "max_tokens": 9, "messages": [USER], "thinking": thinking}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert whole.content[0].to_dict() == streamed.content[0].to_dict()
    assert whole.content[0].thinking == ""


async def test_a_call_that_was_cut_off(client: AsyncAnthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    script(
        monkeypatch,
        routes,
        [ToolCallStart(0, 0, "c", "f"), ToolCallDelta(0, 0, '{"a": "b'), Delta(0, "", finish_reason="length")],
    )
    message = await client.messages.create(model="tiny", max_tokens=9, messages=[USER])
    assert message.content[0].input == {"INVALID_JSON": '{"a": "b'}
    assert message.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("end", "max_tokens", "reason"),
    [
        (Delta(0, "", finish_reason="stop", stop_reason="\n"), 100, ("stop_sequence", "\n")),
        (Delta(0, "", finish_reason="stop", stop_reason=7), 100, ("end_turn", None)),
        (Delta(0, "", finish_reason="length"), 9, ("max_tokens", None)),
        (Delta(0, "", finish_reason="length"), 100, ("model_context_window_exceeded", None)),
    ],
)
async def test_why_it_stopped(
    client: AsyncAnthropic,
    monkeypatch: pytest.MonkeyPatch,
    end: Delta,
    max_tokens: int,
    reason: tuple[str, str | None],
) -> None:
    script(monkeypatch, routes, [Delta(0, "x"), end])
    message = await client.messages.create(model="tiny", max_tokens=max_tokens, messages=[USER])
    assert (message.stop_reason, message.stop_sequence) == reason


async def test_tokens_are_counted_and_nothing_is_generated(client: AsyncAnthropic, llm: ScriptedLLM) -> None:
    counted = await client.messages.count_tokens(model="tiny", system="Be brief.", messages=[USER])
    assert counted.input_tokens == len("<system>Be brief.<user>hi")
    assert not llm.generations


async def test_models_in_the_form_of_who_asks(client: AsyncAnthropic, llm: ScriptedLLM) -> None:
    page = await client.models.list()
    assert [(model.id, model.type, model.max_input_tokens) for model in page.data] == [("tiny", "model", 4096)]
    assert await client.models.retrieve("tiny") == page.data[0]
    with pytest.raises(anthropic.NotFoundError, match="'huge' does not exist"):
        await client.models.retrieve("huge")
    async with client_for(llm) as other:
        assert (await other.get("/v1/models")).json()["object"] == "list"
        assert (await other.get("/v1/models/tiny")).json()["object"] == "model"


async def test_a_prompt_can_be_cached_without_an_answer(client: AsyncAnthropic) -> None:
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi " * 40}]}
    first = await client.messages.create(max_tokens=0, **asked)
    assert (first.content, first.stop_reason, first.usage.output_tokens) == ([], "max_tokens", 0)
    async with client.messages.stream(max_tokens=0, **asked) as stream:
        streamed = await stream.get_final_message()
    assert (streamed.content, streamed.stop_reason) == ([], "max_tokens")
    assert streamed.usage.cache_read_input_tokens


# -- what a request says -------------------------------------------------------------------------------------------


async def test_what_reaches_the_model(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = script(monkeypatch, routes, [Delta(0, "", finish_reason="stop")])
    body = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "stop_sequences": ["END"],
        "tools": [{**TOOL, "strict": True, "input_examples": [{"city": "Rome"}]}],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "string"}}},
        "metadata": {"user_id": "ann"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    response = await post(llm, body, **{"anthropic-version": "2023-06-01", "anthropic-beta": "x"})
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    (call,) = calls
    params = call.params
    assert (params.temperature, params.top_k, params.top_p, params.stop) == (0.5, 3, 0.9, ("END",))
    assert call.tool_choice == NamedTool("weather") and not call.parallel_tool_calls
    assert call.tools[0].strict and call.tools[0].description == 'The weather.\nExamples of input:\n{"city":"Rome"}'
    assert call.template_arguments == {"reasoning_effort": "high", "enable_thinking": True}
    assert call.structure is not None
    assert (call.structure.kind, call.structure.source) == ("json_schema", '{"type":"string"}')
    assert call.structure.param == "output_config.format.schema"


async def test_a_conversation_with_tools_is_one_that_templates_know(
    llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = script(monkeypatch, routes, [Delta(0, "", finish_reason="stop")])
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "of another model"}
    hidden = {"type": "redacted_thinking", "data": "?"}
    told = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain"}], "is_error": True}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [thought, hidden, {"type": "text", "text": "Yes."}, *CALL["content"]]},
        {"role": "user", "content": [told, {"type": "text", "text": "Well?"}]},
        {"role": "user", "content": "Go on."},
    ]
    assert (await post(llm, {"messages": messages, "system": [{"type": "text", "text": "S"}]})).status_code == 200
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    tool_calls = [{"id": "t1", "type": "function", "function": function}]
    assert calls[0].messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "tool_calls": tool_calls},
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "Error: Rain"},
        {"role": "user", "content": "Well?\nGo on."},
    ]
    assert not calls[0].continue_last


async def test_an_answer_that_has_begun_is_continued(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = script(monkeypatch, routes, [Delta(0, "", finish_reason="stop")])
    await post(llm, {"messages": [USER, {"role": "assistant", "content": "Paris is"}]})
    assert calls[0].continue_last


async def test_a_structure_may_be_named_as_others_do(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = script(monkeypatch, routes, [Delta(0, "", finish_reason="stop")])
    await post(llm, {"guided_regex": "a+"})
    structure = calls[0].structure
    assert structure is not None and (structure.kind, structure.param) == ("regex", "guided_regex")
    both = {"guided_regex": "a+", "output_format": {"type": "json_schema", "schema": {"type": "string"}}}
    assert "guided_regex is not allowed together with output_format.schema" in await refused(llm, both)


async def test_marks_hold_what_comes_before_them(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = script(monkeypatch, routes, [Delta(0, "", finish_reason="stop")])
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [{"type": "text", "text": "S", **mark}, {"type": "text", "text": "T"}]
    parts = [{"type": "text", "text": "a", **mark}, {"type": "text", "text": "b"}]
    body = {"tools": [{**TOOL, **mark}], "system": system, "messages": [{"role": "user", "content": parts}]}
    assert (await post(llm, body)).status_code == 200
    first, tools, last = (messages for messages, _ in calls[0].marks)
    assert first == [{"role": "system", "content": "S"}]
    assert tools == [{"role": "system", "content": "S\nT"}]
    assert last == [{"role": "system", "content": "S\nT"}, {"role": "user", "content": "a"}]
    assert {control.seconds for _, control in calls[0].marks} == {3600.0}


# -- refusals --------------------------------------------------------------------------------------------------------


def blocks(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*content]}]}


RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "Rain"}
BAD = [
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (blocks({"type": "image", "source": {}}), "messages[0].content[0].type is 'image'"),
    (blocks({"type": "document", "source": {}}), "messages[0].content[0].type is 'document'"),
    (blocks({"type": "no such thing"}), "messages[0].content[0].type is 'no such thing'"),
    (blocks({"text": "x"}), "messages[0].content[0].type is missing"),
    (blocks("x"), "messages[0].content[0] must be an object"),
    (blocks({"type": "text", "text": 1}), "messages[0].content[0].text must be a valid string"),
    (
        blocks({"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image"}]}),
        "content[0].type is 'image'",
    ),
    (blocks(RESULT), "messages[0].content[0].tool_use_id is that of no call before it: 't1'"),
    (
        {"messages": [CALL, {"role": "user", "content": [RESULT, RESULT]}]},
        "messages[1].content[1].tool_use_id has a result already",
    ),
    ({"messages": [CALL, CALL]}, "messages[1].content[0].id is 't1', which another call already uses"),
    ({"messages": [CALL]}, "messages end with a tool_use"),
    (
        blocks(*CALL["content"]),
        "messages[0].content[0].type is 'tool_use', which is only allowed in messages of the role",
    ),
    (blocks(RESULT, role="assistant"), "is 'tool_result', which is only allowed in messages of the role 'user'"),
    ({"system": [{"type": "image"}]}, "system[0].type is 'image'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is 'web_search_20250305'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type is 'bash_20250124'"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name is 'weather', which another tool already uses"),
    ({"tools": [{**TOOL, "name": "no good"}]}, "tools[0].name"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    (
        {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
        "tools[0].input_schema must be the schema of an obj",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name is 'f'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    ({"tool_choice": {"type": "any"}}, "tool_choice is only allowed together with tools"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"stop_sequences": ["a"], "stop": "b"}, "stop is another name of stop_sequences"),
    ({"container": "c"}, "container is not supported"),
    ({"compaction": {}}, "compaction is not supported"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"system": 5}, "system must be a string or a list of content blocks, not 5."),
    ({"output_format": {"type": "grammar"}}, "output_format.type"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
    ({"temprature": 1}, "temprature is not a parameter"),
]


@pytest.mark.parametrize(("body", "words"), BAD)
async def test_bad_input_is_refused_by_name(llm: ScriptedLLM, body: dict[str, Any], words: str) -> None:
    assert words in await refused(llm, body)


async def test_a_thread_is_refused_so_that_clients_send_all_messages(llm: ScriptedLLM) -> None:
    """The client's tool runner begins with a thread, and goes on without if the error has these details."""
    asked = {"messages": [USER], "thread": {"type": "create"}}
    async with client_for(llm) as client:
        counted = await client.post("/v1/messages/count_tokens", json=asked)
    for answer in (await post(llm, asked), counted):
        error = answer.json()["error"]
        assert error["message"] == "thread is not supported by this server; leave it out."
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_conversations_longer_than_the_context_are_counted(llm: ScriptedLLM) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 100_000}]}
    async with client_for(llm) as client:
        counted = await client.post("/v1/messages/count_tokens", json=long)
        assert counted.json() == {"input_tokens": 100_000 + len("<user>")}
        assert (await client.post("/v1/messages", json={"max_tokens": 1, **long})).status_code == 400


async def test_too_many_marks(llm: ScriptedLLM) -> None:
    marked = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    assert "more than 4 cache_control marks" in await refused(llm, blocks(*[marked] * 5))


async def test_marks_are_refused_before_they_take_memory(llm: ScriptedLLM) -> None:
    """Each one holds the messages before it."""
    marked = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": ("user", "assistant")[number % 2], "content": marked} for number in range(3000)]
    tracemalloc.start()
    try:
        await refused(llm, {"messages": messages})
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


async def test_a_client_sees_errors_of_its_own_kinds(client: AsyncAnthropic, llm: ScriptedLLM) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as bad:
        await client.messages.create(model="tiny", max_tokens=-1, messages=[USER])
    assert bad.value.type == "invalid_request_error" and bad.value.request_id
    with pytest.raises(anthropic.NotFoundError, match="'huge' does not exist") as unknown:
        await client.messages.create(model="huge", max_tokens=1, messages=[USER])
    assert unknown.value.type == "not_found_error"
    llm.failure = OverloadedError("full", 3)
    with pytest.raises(anthropic.RateLimitError) as full:
        await client.messages.create(model="tiny", max_tokens=1, messages=[USER])
    assert full.value.type == "rate_limit_error" and full.value.response.headers["retry-after"] == "3"
    llm.failure = BackendError("broken")
    with pytest.raises(anthropic.InternalServerError) as broken:
        await client.messages.create(model="tiny", max_tokens=1, messages=[USER])
    assert broken.value.type == "api_error"


async def test_a_stream_that_fails_says_so(client: AsyncAnthropic, llm: ScriptedLLM) -> None:
    llm.fail(BackendError("broken"), after=3)
    stream = await client.messages.create(model="tiny", max_tokens=9, messages=[USER], stream=True)
    deltas = 0
    with pytest.raises(anthropic.APIStatusError, match="broken") as failed:
        async for event in stream:
            deltas += event.type == "content_block_delta"
    assert deltas == 3
    assert failed.value.type == "api_error"


async def test_errors_before_the_route_have_the_same_form() -> None:
    async with client_for(ScriptedLLM(config_with(max_body_bytes=1024))) as client:
        large = await client.post("/v1/messages", json={"messages": "x" * 2000})
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        assert (await client.get("/v1/messages/batches")).json()["error"]["type"] == "not_found_error"
        assert (await client.get("/v1/messages")).json()["error"]["type"] == "invalid_request_error"


def test_agents_find_the_words_they_look_for() -> None:
    problem = Problem(400, "invalid_request_error", "5 tokens, and 4 fit.", code="context_length_exceeded")
    assert problem.body("/sub/v1/messages", "r1") == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 5 tokens, and 4 fit."},
        "request_id": "r1",
    }
    assert "type" not in problem.body("/v1/messages_of_others")


async def test_the_key_may_come_in_a_header_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "ann", None)
    llm = ScriptedLLM(config_with(api_keys=str(path)), max_context=4096)
    async with served(llm) as app:
        async with AsyncAnthropic(base_url=app.url, api_key=key, max_retries=0) as client:
            await client.messages.create(model="tiny", max_tokens=1, messages=[USER])
        assert llm.submissions[-1].tenant.name == "ann"
        async with AsyncAnthropic(base_url=app.url, api_key=key[:-1], max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
                await client.messages.create(model="tiny", max_tokens=1, messages=[USER])
        async with AsyncAnthropic(base_url=app.url, auth_token=key, max_retries=0) as client:
            await client.messages.count_tokens(model="tiny", messages=[USER])
