"""OpenAI's Responses as its own client sees them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cllm.config import Config
from cllm.dialect.deltas import Delta, ToolCallDelta, ToolCallStart
from cllm.dialect.tools import Tool
from cllm.errors import BackendError
from cllm.server.auth.key_file import add_key
from cllm.server.inference.blocks import ContentBlocks
from cllm.server.responses import routes as routes
from cllm.server.responses.items import MOST_ARGUMENT_VALUES, ConversationBuilder
from cllm.server.responses.tools import ToolNames
from cllm.server.schema.tools import NamedTool
from http_kit import client_for, config_with, served
from scripted_chat import CALLS, script
from scripted_llm import TEMPLATE, ScriptedLLM

TOOL = {"type": "function", "name": "weather", "description": "The weather.", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "Rain"}
SPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "close", "parameters": {"type": "object"}}],
}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits a file.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
async def llm() -> ScriptedLLM:
    return ScriptedLLM(max_context=4096)


@pytest.fixture
async def client(llm: ScriptedLLM) -> AsyncIterator[AsyncOpenAI]:
    async with served(llm) as app, AsyncOpenAI(base_url=f"{app.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


async def post(llm: ScriptedLLM, body: dict[str, Any]) -> Any:
    async with client_for(llm) as client:
        return await client.post("/v1/responses", json={"input": "hi", **body})


async def events_of(llm: ScriptedLLM, body: dict[str, Any]) -> list[Any]:
    text = (await post(llm, {**body, "stream": True})).text
    pairs = [dict(line.split(": ", 1) for line in each.splitlines()) for each in text.strip().split("\n\n")]
    events = [json.loads(pair["data"]) for pair in pairs]
    assert [pair["event"] for pair in pairs] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event)  # strictly as OpenAI's package has them
    return events


def prompt_of(llm: ScriptedLLM) -> str:
    return "".join(map(chr, llm.generations[-1].prompt_ids))


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_a_response(client: AsyncOpenAI, llm: ScriptedLLM) -> None:
    response = await client.responses.create(
        model="tiny", input="hi", instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=100
    )
    Response.model_validate(response.to_dict())
    assert response.id == llm.generations[0].request_id and response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", "tiny")
    assert response.output_text == "Hello, wörld!"
    assert (response.output[0].type, response.output[0].status) == ("message", "completed")
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    prompt = prompt_of(llm)
    assert prompt == "<system>Be brief.<user>hi"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(prompt), 15)
    assert response.usage.input_tokens_details.cached_tokens == 0
    assert response.usage.total_tokens == len(prompt) + 15


async def test_usage_counts_cached_tokens(client: AsyncOpenAI, llm: ScriptedLLM) -> None:
    for cached in (0, 48):
        response = await client.responses.create(model="tiny", input="a prompt of three blocks and a bit, sent twice")
        assert response.usage is not None and response.usage.input_tokens_details.cached_tokens == cached


async def test_an_answer_that_was_cut_off(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model="tiny", input="hi", max_output_tokens=3)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.output_text, response.output[0].status) == ("Hel", "incomplete")


async def test_events_are_complete_and_in_order(llm: ScriptedLLM) -> None:
    events = await events_of(llm, {"max_output_tokens": 2})
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert events[3]["part"]["text"] == "" and events[2]["item"]["content"] == []
    assert events[6]["text"] == events[7]["part"]["text"] == events[8]["item"]["content"][0]["text"] == "He"


async def test_events_of_calls_and_reasoning(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = script(monkeypatch, routes, CALLS)
    events = await events_of(llm, {"tools": [TOOL]})
    delta = ".delta"
    assert [event["type"].removeprefix("response.") for event in events[2:]] == [
        *("output_item.added", "content_part.added", "reasoning_text" + delta, "reasoning_text" + delta),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text" + delta, "output_text" + delta),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments" + delta, "function_call_arguments" + delta),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments" + delta, "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    response = Response.model_validate(events[-1]["response"])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    assert (done[2]["call_id"], done[2]["name"], done[2]["arguments"]) == ("call_1", "weather", '{"city": "Paris"}')
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens == 3
    assert calls[0].tools == [Tool("weather", "The weather.", {"type": "object"})]
    whole = (await post(llm, {"tools": [TOOL]})).json()
    assert whole["output"] == done


async def test_an_answer_without_text_has_an_empty_one(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, routes, [Delta(0, "", finish_reason="stop")])
    events = await events_of(llm, {})
    whole = (await post(llm, {})).json()
    assert whole["output"] == events[-1]["response"]["output"]
    assert whole["output"][0]["content"][0]["text"] == ""


async def test_a_call_that_was_cut_off(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    script(
        monkeypatch,
        routes,
        [ToolCallStart(0, 0, "c", "f"), ToolCallDelta(0, 0, '{"a": "b'), Delta(0, "", finish_reason="length")],
    )
    async with client_for(llm) as client:
        response = (await client.post("/v1/responses", json={"input": "hi"})).json()
        assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
        body = {"previous_response_id": response["id"], "input": [{**OUTPUT, "call_id": "c"}]}
        assert (await client.post("/v1/responses", json=body)).status_code == 200


async def test_the_client_helper_reads_a_stream(client: AsyncOpenAI) -> None:
    async with client.responses.stream(model="tiny", input="hi") as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == "Hello, wörld!"


async def test_log_probabilities(llm: ScriptedLLM) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 2}
    events = await events_of(llm, asked)
    part = events[-1]["response"]["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["H", "e"]
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [2, 2]
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta] == part["logprobs"]
    assert (await post(llm, {})).json()["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_text_has_the_log_probabilities_of_its_own_tokens(streamed: bool) -> None:
    """Those of reasoning and calls, with all their marks, belong to no text."""
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    llm = ScriptedLLM(max_context=4096, template="{% if tools %}<tool_call>{% endif %}{# <think></think> #}" + TEMPLATE)
    llm.says = f"<think>So.</think>\n\nI see. {call}\n{call} It <b> rains. "
    body = {"include": ["message.output_text.logprobs"], "tools": [TOOL]}
    whole = (await events_of(llm, body))[-1]["response"] if streamed else (await post(llm, body)).json()
    parts = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    assert [item["type"] for item in whole["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert [part["text"] for part in parts] == ["I see.", "It <b> rains. "]
    for part in parts:
        assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]


async def test_a_stream_that_fails_says_so(client: AsyncOpenAI, llm: ScriptedLLM) -> None:
    llm.fail(BackendError("broken"), after=3)
    events = [event async for event in await client.responses.create(model="tiny", input="hi", stream=True)]
    assert events[-1].type == "response.failed" and events[-1].sequence_number == len(events) - 1
    assert events[-1].response.error is not None and events[-1].response.error.message == "broken"
    with pytest.raises(openai.InternalServerError):
        await client.responses.create(model="tiny", input="hi")


# -- what a request says -------------------------------------------------------------------------------------------


async def test_what_reaches_the_model(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = script(monkeypatch, routes, [Delta(0, "", finish_reason="stop")])
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "string"}, "strict": True}
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 7,
        "tools": [{**TOOL, "strict": True}, {"type": "function", "name": "time"}],
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False,
        "text": {"format": schema, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "disabled",
        "background": False,
        "service_tier": "flex",
        "prompt_cache_key": "k",
        "max_tool_calls": 3,
    }
    response = await post(llm, body)
    assert response.status_code == 200, response.text
    (call,) = calls
    assert (call.params.temperature, call.params.top_p, call.params.max_tokens) == (0.5, 0.9, 7)
    assert call.tool_choice == NamedTool("weather") and not call.parallel_tool_calls
    assert [(tool.name, tool.strict) for tool in call.tools] == [("weather", True), ("time", False)]
    assert call.template_arguments == {"reasoning_effort": "low"}
    assert call.structure is not None and call.structure.source == '{"type":"string"}'
    assert call.structure.param == "text.format.schema"
    said = response.json()
    assert said["text"]["format"]["schema"] == {"type": "string"} and said["tools"][1]["name"] == "time"
    await post(llm, {"text": {"format": {"type": "json_object"}}})
    assert calls[1].structure is not None and calls[1].structure.kind == "json"
    await post(llm, {"guided_regex": "a+"})
    assert calls[2].structure is not None and calls[2].structure.param == "guided_regex"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}
    await post(llm, {"tools": body["tools"], "tool_choice": allowed})
    assert calls[3].tool_choice == "required" and [tool.name for tool in calls[3].tools] == ["time"]


async def test_items_are_a_conversation_that_templates_know(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = script(monkeypatch, routes, [Delta(0, "", finish_reason="stop")])
    said = {"type": "output_text", "text": "I'll look.", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [said]},
        CALL,
        {**CALL, "call_id": "c2", "arguments": '{"city'},
        OUTPUT,
        {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "Sun"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "of another model"},
        {"role": "assistant", "content": "It rains."},
        {"role": "assistant", "content": "It shines, too."},
        {"role": "user", "content": "Really?"},
    ]
    response = await post(llm, {"input": items, "instructions": "I"})
    assert response.status_code == 200, response.text
    assert calls[0].messages == [
        {"role": "system", "content": "I\n\nD"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I'll look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}},
                {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": '{"city'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "Rain"},
        {"role": "tool", "tool_call_id": "c2", "name": "weather", "content": "Sun"},
        {"role": "assistant", "content": "It rains."},
        {"role": "assistant", "content": "It shines, too."},
        {"role": "user", "content": "Really?"},
    ]


# -- tools that are no functions -------------------------------------------------------------------------------------

NO_FUNCTIONS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False, "filters": {"allowed_domains": ["example.org"]}},
    SPACE,
    {**SPACE, "name": "mcp__files__", "tools": [{**TOOL, "name": "read"}]},
    PATCH,
    {"type": "local_shell"},
    {"type": "web_search"},
]
NAMED: list[Any] = [
    ToolCallStart(0, 0, "call_1", "agents__close"),
    ToolCallDelta(0, 0, '{"id":'),
    ToolCallDelta(0, 0, ' "7"}'),
    ToolCallStart(0, 1, "call_2", "patch"),
    ToolCallDelta(0, 1, '{"input": "*** Be'),
    ToolCallDelta(0, 1, 'gin\\n\\"ü\\""}'),
    Delta(0, "", finish_reason="tool_calls"),
]


async def test_namespaces_and_custom_tools_are_functions(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = script(monkeypatch, routes, NAMED)
    response = await post(llm, {"tools": NO_FUNCTIONS, "client_metadata": {"session_id": "s"}})
    assert response.status_code == 200, response.text
    assert response.headers["x-tools-left-out"] == "web_search, local_shell"
    assert [tool.name for tool in calls[0].tools] == ["agents__close", "mcp__files__read", "patch"]
    custom = calls[0].tools[2]
    assert custom.description == "Edits a file.\n\nThe input must follow this lark grammar:\nstart: /.+/"
    assert custom.parameters is not None and custom.parameters["required"] == ["input"]
    said = response.json()
    assert [tool["type"] for tool in said["tools"]] == ["namespace", "namespace", "custom"]
    function, patch = said["output"]
    assert (function["type"], function["namespace"], function["name"]) == ("function_call", "agents", "close")
    assert (function["call_id"], function["arguments"]) == ("call_1", '{"id": "7"}')
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", '*** Begin\n"ü"')
    assert "namespace" not in patch and "arguments" not in patch
    assert "x-tools-left-out" not in (await post(llm, {"tools": [SPACE]})).headers


async def test_their_calls_are_streamed_as_clients_know_them(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, routes, NAMED)
    events = await events_of(llm, {"tools": NO_FUNCTIONS})
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    assert events[5]["name"] == "close" and events[6]["item"]["namespace"] == "agents"
    assert events[7]["item"]["input"] == "" and events[7]["item"]["id"] == events[8]["item_id"]
    assert events[8]["delta"] == events[9]["input"] == events[10]["item"]["input"] == '*** Begin\n"ü"'
    assert [events[6]["item"], events[10]["item"]] == events[-1]["response"]["output"]


async def test_a_custom_call_that_is_no_object_is_passed_on(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("plain", '{"input": 3}', "[" * 3000):
        pieces = [ToolCallStart(0, 0, "c", "patch"), ToolCallDelta(0, 0, text), Delta(0, "", finish_reason="length")]
        script(monkeypatch, routes, pieces)
        assert (await post(llm, {"tools": [PATCH]})).json()["output"][0]["input"] == text


async def test_their_calls_come_back_as_the_models_own(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a client's own history, and in that of a stored response."""
    calls = script(monkeypatch, routes, NAMED)
    async with client_for(llm) as client:

        async def ask(**body: Any) -> Any:
            return (await client.post("/v1/responses", json={"tools": NO_FUNCTIONS, **body})).json()

        first = await ask(input="hi")
        outputs = [
            {"type": "function_call_output", "call_id": "call_1", "output": "closed"},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": "patched"},
        ]
        await ask(input=[{"role": "user", "content": "hi"}, *first["output"], *outputs], store=False)
        second = await ask(input=outputs, previous_response_id=first["id"])
        assert second["error"] is None
        listed = (await client.get(f"/v1/responses/{second['id']}/input_items?order=asc")).json()["data"]
    plain = [
        [{key: call[key] for key in ("id", "type", "function")} for call in message.get("tool_calls", ())]
        for message in calls[1].messages
    ]
    functions = [call["function"] for call in plain[1]]
    assert functions == [
        {"name": "agents__close", "arguments": {"id": "7"}},
        {"name": "patch", "arguments": {"input": '*** Begin\n"ü"'}},
    ]
    assert calls[1].messages == calls[2].messages
    assert [(message["role"], message.get("name")) for message in calls[1].messages[2:]] == [
        ("tool", "agents__close"),
        ("tool", "patch"),
    ]
    assert [item["type"] for item in listed[1:]] == [
        "function_call",
        "custom_tool_call",
        "function_call_output",
        "custom_tool_call_output",
    ]
    assert (listed[1]["namespace"], listed[1]["name"], listed[2]["input"]) == ("agents", "close", '*** Begin\n"ü"')


@pytest.mark.parametrize("name", ["agents__close", "close"])
async def test_a_tool_of_a_namespace_can_be_chosen(
    llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls = script(monkeypatch, routes, [Delta(0, "", finish_reason="stop")])
    chosen = {"type": "function", "name": name}
    await post(llm, {"tools": NO_FUNCTIONS, "tool_choice": chosen})
    await post(
        llm, {"tools": NO_FUNCTIONS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [chosen]}}
    )
    assert calls[0].tool_choice == NamedTool("agents__close")
    assert [tool.name for tool in calls[1].tools] == ["agents__close"]


# -- going on from a response ----------------------------------------------------------------------------------------


async def test_a_conversation_goes_on_from_a_response(client: AsyncOpenAI, llm: ScriptedLLM) -> None:
    first = await client.responses.create(model="tiny", input="one", instructions="I", max_output_tokens=5)
    second = await client.responses.create(model="tiny", input="two", previous_response_id=first.id)
    assert prompt_of(llm) == "<user>one<assistant>Hello<user>two"
    assert second.previous_response_id == first.id
    async with client.responses.stream(
        model="tiny", input="three", previous_response_id=second.id, instructions="J"
    ) as stream:
        third = await stream.get_final_response()
    assert prompt_of(llm).startswith("<system>J<user>one<assistant>Hello<user>two<assistant>Hello, w")
    await client.responses.delete(first.id)
    await client.responses.create(model="tiny", input="four", previous_response_id=third.id)
    assert prompt_of(llm).startswith("<user>one<assistant>Hello<user>two")


async def test_stored_responses_are_read_and_deleted(client: AsyncOpenAI) -> None:
    made = await client.responses.create(model="tiny", input="one")
    assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
    await client.responses.delete(made.id)
    for again in (client.responses.retrieve(made.id), client.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError, match="not found: responses are kept"):
            await again
    with pytest.raises(openai.NotFoundError) as gone:
        await client.responses.create(model="tiny", input="two", previous_response_id=made.id)
    assert (gone.value.param, gone.value.code) == ("previous_response_id", "response_not_found")
    with pytest.raises(openai.BadRequestError, match="no background responses"):
        await client.responses.cancel(made.id)


async def test_input_tokens_are_counted_as_they_are_charged(client: AsyncOpenAI, llm: ScriptedLLM) -> None:
    first = await client.responses.create(model="tiny", input="one")
    body: Any = {"model": "tiny", "input": "two", "instructions": "I", "previous_response_id": first.id}
    counted = await client.responses.input_tokens.count(**body)
    assert (counted.object, len(llm.generations)) == ("response.input_tokens", 1)
    second = await client.responses.create(**body)
    assert second.usage is not None and second.usage.input_tokens == counted.input_tokens
    long = await client.responses.input_tokens.count(model="tiny", input="a" * 5000)
    assert long.input_tokens > 5000, "it may be longer than the context"


async def test_input_items_are_what_a_response_answers(client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, routes, CALLS)
    first = await client.responses.create(model="tiny", input=[{"role": "user", "content": "one"}], tools=[TOOL])  # type: ignore[list-item]
    results: Any = [{"type": "function_call_output", "call_id": f"call_{number}", "output": "18"} for number in (1, 2)]
    second = await client.responses.create(model="tiny", input=results, previous_response_id=first.id)
    items: list[Any] = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    kinds = ["message", "reasoning", "message", *["function_call"] * 2, *["function_call_output"] * 2]
    assert [item.type for item in items] == kinds
    assert len({item.id for item in items}) == len(items)
    assert (items[0].content[0].text, items[1].content[0].text, items[2].content[0].text) == (
        "one", "Let me think.", "I'll look.",
    )  # fmt: skip
    assert (items[3].name, json.loads(items[3].arguments), items[5].output) == ("weather", {"city": "Paris"}, "18")
    hints: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    newest_first = [item async for item in client.responses.input_items.list(second.id, include=hints)]
    assert [item.id for item in newest_first] == [item.id for item in items[::-1]]
    for query, said in (
        ({"limit": 0}, "limit is '0'; it must be from 1 to 100"),
        ({"order": "up"}, "order is 'up'; it must be 'asc' or 'desc'"),
        ({"after": "x"}, "after is 'x', which is no input item"),
        ({"before": "x"}, "'before' is not a parameter of this request"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            await client.responses.input_items.list(second.id, extra_query=query)
    with pytest.raises(openai.NotFoundError, match="not found"):
        await client.responses.input_items.list("resp-none")


async def test_input_items_have_the_roles_that_were_sent(client: AsyncOpenAI, llm: ScriptedLLM) -> None:
    roles = ["developer", "system", "user", "developer", "user"]
    sent: Any = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]
    made = await client.responses.create(model="tiny", input=sent)
    items: Any = [item async for item in client.responses.input_items.list(made.id, order="asc")]
    assert [(item.role, item.content[0].text) for item in items] == [(each["role"], each["content"]) for each in sent]
    await client.responses.create(model="tiny", input="on", previous_response_id=made.id)
    for messages, _ in llm.asked:
        assert messages[0] == {"role": "system", "content": "0\n\n1"}, "templates know no developer"
        assert [message["role"] for message in messages[1:4]] == ["user", "system", "user"]


async def test_what_is_not_to_be_stored_is_not(client: AsyncOpenAI) -> None:
    made = await client.responses.create(model="tiny", input="one", store=False)
    with pytest.raises(openai.NotFoundError, match="unless store is false"):
        await client.responses.retrieve(made.id)


async def test_a_server_that_stores_none() -> None:
    llm = ScriptedLLM(Config.model_validate({"responses": {"max_stored": 0}}), max_context=4096)
    made = (await post(llm, {"store": True})).json()
    assert made["store"] is False
    refused = await post(llm, {"previous_response_id": made["id"]})
    assert (refused.status_code, "responses.max_stored is 0" in refused.text) == (404, True)


async def test_a_key_never_sees_what_another_has_stored(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = [add_key(path, name, None) for name in ("ann", "bob")]
    llm = ScriptedLLM(config_with(api_keys=str(path), share_prefixes=True), max_context=4096)
    async with served(llm) as app:
        ann, bob = (AsyncOpenAI(base_url=f"{app.url}/v1", api_key=key, max_retries=0) for key in keys)
        async with ann, bob:
            made = await ann.responses.create(model="tiny", input="secret")
            for looks in (
                bob.responses.retrieve(made.id),
                bob.responses.delete(made.id),
                bob.responses.create(model="tiny", input="?", previous_response_id=made.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await looks
            assert (await ann.responses.retrieve(made.id)).id == made.id


# -- refusals --------------------------------------------------------------------------------------------------------


def parts(*content: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [*content]}]}


BAD = [
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": ["x"]}, "input[0]"),
    (parts({"type": "input_image", "image_url": "x"}), "input[0].content[0].type"),
    (parts({"type": "input_file", "file_id": "x"}), "input[0].content[0].type"),
    (parts({"type": "input_text"}), "input[0].content[0].text"),
    ({"input": [OUTPUT]}, "input[0].call_id"),
    ({"input": [CALL, CALL]}, "input[1].call_id"),
    ({"input": [CALL, OUTPUT, OUTPUT]}, "input[2].call_id"),
    ({"input": [{**CALL, "arguments": "[" * 70_000}]}, "input[0].arguments"),
    ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "f", "format": {"type": "x"}}]}, "tools[0].format.type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [SPACE, {**TOOL, "name": "agents__close"}]}, "tools[1].name"),
    ({"tools": [{**SPACE, "tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type"),
    (
        {
            "tools": [
                {**SPACE, "name": f"a{n}", "tools": [{**TOOL, "name": f"f{m}"} for m in range(60)]} for n in range(9)
            ]
        },
        "tools",
    ),
    ({"tools": [SPACE], "tool_choice": {"type": "function", "name": "open"}}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"include": ["everything"]}, "include[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"max_tokens": 3}, "max_tokens"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_bad_input_is_refused_by_name(llm: ScriptedLLM, body: dict[str, Any], param: str) -> None:
    refused = await post(llm, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


@pytest.mark.parametrize("given", [5, []])
async def test_what_input_may_be(llm: ScriptedLLM, given: Any) -> None:
    message = (await post(llm, {"input": given})).json()["error"]["message"]
    assert "list of items" in message and "token ids" not in message


async def test_too_long_an_input_is_named_as_such(llm: ScriptedLLM) -> None:
    error = (await post(llm, {"input": "word " * 20_000})).json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


def test_an_answer_is_kept_whatever_it_holds() -> None:
    """A client's arguments may be refused; the model's go to the template as they are."""
    arguments = '{"a": [' + "1," * MOST_ARGUMENT_VALUES + "1]}"
    blocks, turns = ContentBlocks(), ConversationBuilder()
    for piece in (
        ToolCallStart(0, 0, "c1", "f"),
        ToolCallDelta(0, 0, arguments),
        Delta(0, "", finish_reason="tool_calls", stop_reason=None),
    ):
        blocks.add(piece)
    turns.add_answer(blocks, ToolNames(()))
    (message,) = turns.messages
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("path", ["compact", "resp-1/cancel"])
async def test_routes_that_are_not_here_say_so(llm: ScriptedLLM, path: str) -> None:
    async with client_for(llm) as client:
        refused = await client.post(f"/v1/responses/{path}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")
    assert path.split("/")[-1] in refused.json()["error"]["message"]


async def test_half_a_surrogate_pair_in_a_hint_is_refused(llm: ScriptedLLM) -> None:
    """It is part of the response, which could not be written."""
    body = json.dumps({"input": "hello", "text": {"verbosity": "\ud800"}}).encode()
    async with client_for(llm) as client:
        answer = await client.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "text.verbosity"
