"""Tools and reasoning over HTTP, as OpenAI's client sees them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from cllm.config import Config
from cllm.dialect.deltas import Delta
from cllm.server.inference.streams import CompletionStream
from cllm.server.openai.replies import ChatReply
from cllm.text.chat_template import PLAIN
from http_kit import client_for
from scripted_llm import TEMPLATE, ScriptedLLM

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
CALL = '{"name": "f", "arguments": {"a": 1}}'
HERMES = "{% if tools %}<tool_call>{% endif %}" + TEMPLATE
THINKS = "{{ '<think></think>' if enable_thinking is false }}" + TEMPLATE


async def ask(llm: ScriptedLLM, **body: Any) -> httpx.Response:
    async with client_for(llm) as client:
        return await client.post("/v1/chat/completions", json={"messages": [USER], **body})


async def choice(llm: ScriptedLLM, **body: Any) -> dict[str, Any]:
    response = await ask(llm, **body)
    assert response.status_code == 200, response.text
    reply = response.json()
    assert ChatReply.model_validate(reply).model_dump(exclude_unset=True) == reply
    (only,) = reply["choices"]
    return dict(only)


async def deltas(llm: ScriptedLLM, **body: Any) -> list[dict[str, Any]]:
    response = await ask(llm, stream=True, **body)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]


def fake(text: str, template: str = HERMES, **settings: Any) -> ScriptedLLM:
    return ScriptedLLM(Config.model_validate({"chat": settings}), text=text, template=template, max_context=4096)


async def test_a_call() -> None:
    answer = await choice(fake(f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>"), tools=[TOOL])
    (call,) = answer["message"].pop("tool_calls")
    assert answer["message"] == {"role": "assistant", "content": "Let me see.", "refusal": None}
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert answer["finish_reason"] == "tool_calls"


async def test_calls_without_text_have_no_content_and_ids_differ() -> None:
    answer = await choice(fake(f"<tool_call>{CALL}</tool_call>" * 2), tools=[TOOL])
    assert answer["message"]["content"] is None
    first, second = answer["message"]["tool_calls"]
    assert first["id"] != second["id"]


async def test_a_streamed_call() -> None:
    events = await deltas(fake(f"So: <tool_call>{CALL}</tool_call><tool_call>{CALL}"), tools=[TOOL])
    said = [event["delta"] for event in events]
    assert said[0] == {"role": "assistant", "content": "S"}
    assert "".join(delta.get("content") or "" for delta in said) == "So:"
    calls = [delta["tool_calls"][0] for delta in said if "tool_calls" in delta]
    begun = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in begun] == [
        (number, "function", {"name": "f", "arguments": ""}) for number in range(2)
    ]
    for number in range(2):
        own = [call["function"]["arguments"] for call in calls if call["index"] == number]
        assert "".join(own) == '{"a": 1}'
        assert len(own) > 2, "arguments come as they grow"
    assert said[-1] == {}
    assert [event["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("streamed", [False, True])
async def test_tagged_calls(streamed: bool) -> None:
    template = HERMES + "{% if tools %}<function={% endif %}"
    values = "<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\ny\n</parameter>"
    llm = fake(f"So.\n<tool_call>\n<function=f>\n{values}\n</function>\n</tool_call>", template=template)
    if streamed:
        events = await deltas(llm, tools=[TOOL])
        calls = [event["delta"]["tool_calls"][0] for event in events if "tool_calls" in event["delta"]]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        reason = events[-1]["finish_reason"]
    else:
        answer = await choice(llm, tools=[TOOL])
        assert answer["message"]["content"] == "So."
        arguments, reason = answer["message"]["tool_calls"][0]["function"]["arguments"], answer["finish_reason"]
    assert (json.loads(arguments), reason) == ({"a": 1, "b": "x\ny"}, "tool_calls")


async def test_an_answer_that_is_a_call_alone_begins_with_its_role() -> None:
    first = (await deltas(fake(f"<tool_call>{CALL}"), tools=[TOOL]))[0]["delta"]
    assert (first["role"], first["content"], first["tool_calls"][0]["function"]["name"]) == ("assistant", None, "f")


async def scored(llm: ScriptedLLM, *, streamed: bool, **body: Any) -> str:
    """The tokens whose log probabilities come."""
    body = {"tools": [TOOL], "logprobs": True, **body}
    choices = await deltas(llm, **body) if streamed else [await choice(llm, **body)]
    return "".join(entry["token"] for each in choices for entry in (each["logprobs"] or {"content": []})["content"])


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_tokens_log_probability_comes_once(streamed: bool) -> None:
    llm = fake(f"<think>x</think>Well. <tool_call>{CALL}</tool_call> ", template=HERMES + THINKS.removesuffix(TEMPLATE))
    assert await scored(llm, streamed=streamed) == llm.says


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("after", ["Well.", f"<tool_call>{CALL}</tool_call>", ""])
async def test_hidden_reasoning_has_no_log_probabilities(after: str, streamed: bool) -> None:
    llm = fake(f"<think>x y</think>{after}", template=HERMES + THINKS.removesuffix(TEMPLATE))
    assert await scored(llm, streamed=streamed, include_reasoning=False) == after


async def test_hidden_reasoning_that_is_cut_off_has_no_log_probabilities() -> None:
    for length in range(1, len("<think>x </think>\n")):
        llm = fake("<think>x </think>\nWell.", template=HERMES + THINKS.removesuffix(TEMPLATE))
        shown = await scored(llm, streamed=True, include_reasoning=False, max_tokens=length)
        assert shown == (llm.says[:length] if length < len("<think>") else "")


async def test_cut_off_arguments_end_with_length() -> None:
    answer = await choice(fake(f"<tool_call>{CALL}"), tools=[TOOL], max_tokens=44)
    assert answer["finish_reason"] == "length"
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '


@pytest.mark.parametrize("streamed", [False, True])
async def test_at_most_one_call(streamed: bool) -> None:
    one = f"<tool_call>{CALL}</tool_call>"
    llm = fake(one * 3)
    llm.hold(len(one) * 2)  # no more are computed: it ends because it is stopped
    body: dict[str, Any] = {"tools": [TOOL], "parallel_tool_calls": False}
    answer = (await deltas(llm, **body))[-1] if streamed else await choice(llm, **body)
    assert answer["finish_reason"] == "tool_calls"
    assert streamed or len(answer["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("ahead", [False, True])
async def test_usage_counts_the_tokens_up_to_the_end_of_the_last_call(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far the engine is ahead of who reads."""
    begin = f"<tool_call>{CALL}"
    llm = fake(f"{begin}</tool_call>" * 3)
    read = CompletionStream.__anext__

    async def read_late(stream: CompletionStream) -> list[Delta]:
        while not all(generation.done for generation in stream.generations):
            await asyncio.sleep(0.001)
        return await read(stream)

    if ahead:
        monkeypatch.setattr(CompletionStream, "__anext__", read_late)
    else:
        llm.hold(len(begin) + 1)  # the prompt's step gives the first token
    body = {"tools": [TOOL], "parallel_tool_calls": False}
    assert (await ask(llm, **body)).json()["usage"]["completion_tokens"] == len(begin)
    if not ahead:
        llm.hold(len(begin) + 1)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, _done = (line for line in (await ask(llm, **body, **options)).text.splitlines() if line)
    assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] == len(begin)


async def test_without_tools_or_with_none_nothing_is_read() -> None:
    text = f"<tool_call>{CALL}"
    for body in ({}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}):
        llm = fake(text)
        answer = await choice(llm, **body)
        assert (answer["message"]["content"], answer["finish_reason"]) == (text, "stop")
        assert not llm.asked[0][1].tools


async def test_the_conversation_reaches_the_template() -> None:
    llm = fake("Done.")
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "42"}]},
    ]
    arguments = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"}
    await choice(llm, messages=messages, tools=[TOOL], **arguments)
    plain, options = llm.asked[0]
    assert plain == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
    ]
    assert options.tools == [TOOL]
    assert options.arguments == {"enable_thinking": True, "reasoning_effort": "low"}
    await choice(llm, reasoning_effort="none", add_generation_prompt=False)
    assert llm.asked[1][1].arguments == {"reasoning_effort": "none", "enable_thinking": False}
    assert not llm.asked[1][1].asks


@pytest.mark.parametrize(
    ("body", "masked"),
    [
        ({"tools": [TOOL]}, False),
        ({"tools": [STRICT]}, True),
        ({"tools": [TOOL], "tool_choice": "required"}, True),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"tools": [STRICT], "tool_choice": "none"}, False),
    ],
)
async def test_calls_that_must_be_certain_are_masked(body: dict[str, Any], masked: bool) -> None:
    llm = fake(f"<tool_call>{CALL}")
    await choice(llm, **body)
    assert bool(llm.compiled) == masked
    assert (llm.generations[0].request.params.structured is not None) == masked
    if masked:
        assert (llm.compiled[0].kind, llm.compiled[0].param) == ("lark", "tools")


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_the_model_is_told_of_the_tools_that_are_allowed(mode: str) -> None:
    llm = fake(f"<tool_call>{CALL}")
    other = {"type": "function", "function": {"name": "other"}}
    chosen = {"type": "function", "function": {"name": "f"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [chosen]}}
    await choice(llm, tools=[other, TOOL], tool_choice=allowed)
    assert llm.asked[0][1].tools == [TOOL] and bool(llm.compiled) == (mode == "required")
    for bad, param in (
        ({**allowed, "allowed_tools": {"mode": "none", "tools": [chosen]}}, "tool_choice.allowed_tools.mode"),
        ({**allowed, "allowed_tools": {"mode": mode, "tools": []}}, "tool_choice.allowed_tools.tools"),
        ({"type": "custom"}, "tool_choice.type"),
        (allowed, "tool_choice"),
        ("x", "tool_choice"),
    ):
        refused = await ask(llm, tools=[other], tool_choice=bad)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert refused.json()["error"]["message"] == "tool_choice must be 'auto', 'none', 'required' or an object, not 'x'."
    refused = await ask(llm, tools=[{"type": "function", "function": {"name": "f", "parameters": 5}}])
    assert refused.json()["error"]["message"] == "tools[0].function.parameters must be an object, not 5."
    refused = await ask(llm, tools=[{"type": "custom", "custom": {"name": "f"}}])
    assert refused.json()["error"]["message"].startswith("tools[0].type is 'custom'; it must be 'function'")
    refused = await ask(llm, tools=[{"type": "function", "function": {"name": None}}])
    assert refused.json()["error"]["message"].endswith("not null.")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("settings", "body", "reasoning", "content"),
    [
        ({}, {}, "Hm.", "Yes."),
        ({}, {"separate_reasoning": False}, None, "<think>\nHm.\n</think>\nYes."),
        ({}, {"reasoning_format": "none"}, None, "<think>\nHm.\n</think>\nYes."),
        ({}, {"include_reasoning": False}, None, "Yes."),
        ({"reasoning": "off"}, {}, None, "<think>\nHm.\n</think>\nYes."),
        ({"reasoning": "off"}, {"reasoning_format": "deepseek"}, "Hm.", "Yes."),
    ],
)
async def test_reasoning(
    settings: dict[str, Any], body: dict[str, Any], reasoning: str | None, content: str, streamed: bool
) -> None:
    llm = fake("<think>\nHm.\n</think>\nYes.", template=THINKS, **settings)
    if streamed:
        said = [event["delta"] for event in await deltas(llm, **body)]
        assert said[0]["role"] == "assistant"
        found = "".join(delta.get("reasoning_content") or "" for delta in said)
        assert (found or None, "".join(delta.get("content") or "" for delta in said)) == (reasoning, content)
    else:
        message = (await choice(llm, **body))["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


async def test_plain_chats_pass_by_all_this() -> None:
    llm = ScriptedLLM(text="<think>x</think><tool_call>")
    assert (await choice(llm))["message"]["content"] == llm.says
    assert not llm.compiled


async def test_a_result_must_be_that_of_a_call() -> None:
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}],
    }
    result = {"role": "tool", "tool_call_id": "b", "content": "42"}
    error = (await ask(fake("Done."), messages=[USER, called, result], tools=[TOOL])).json()["error"]
    assert error["param"] == "messages[2].tool_call_id"
    assert error["message"] == "messages[2].tool_call_id is that of no call before it: 'b'."
    # An id may come again with another call, and a result may come later.
    turn = [called, {**result, "tool_call_id": "a"}]
    assert (await ask(fake("Done."), messages=[USER, *turn, USER, *turn, called, USER, turn[1]])).status_code == 200


async def test_reasoning_in_the_content_has_the_mark_that_the_prompt_had() -> None:
    llm = fake("Hm</think>Yes", template=TEMPLATE + "{{ '<think>' if add_generation_prompt }}{# </think> #}")
    assert (await choice(llm, separate_reasoning=False))["message"]["content"] == "<think>Hm</think>Yes"
    begun = [USER, {"role": "assistant", "content": "<think>So"}]
    answer = await choice(llm, separate_reasoning=False, messages=begun, continue_final_message=True)
    assert answer["message"]["content"] == "Hm</think>Yes"


class ToldOfTools(ScriptedLLM):
    """Its prompts hold the tools' descriptions, and are no longer than the context."""

    async def encode_chat(
        self, messages: Any, params: Any = None, options: Any = PLAIN, limit: Any = None
    ) -> list[int]:
        ids = [0] * sum(len(tool["function"]["description"]) for tool in options.tools)
        ids += await super().encode_chat(messages, params, options)
        (limit or self.text.prompt_limit(params)).check(ids, "messages")
        return ids


@pytest.mark.parametrize(("told", "said", "param"), [(200, 1, "tools"), (50, 60, "messages"), (200, 5000, "tools")])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_what_is_too_long_is_named(path: str, told: int, said: int, param: str) -> None:
    function = {**TOOL["function"], "description": "x" * told}  # type: ignore[dict-item]
    message = {"role": "user", "content": "y" * said}
    body: dict[str, Any] = {"messages": [message], "tools": [{"type": "function", "function": function}]}
    if path == "/v1/responses":
        body, param = (
            {"input": [message], "tools": [{"type": "function", **function}]},
            param.replace("messages", "input"),
        )
    async with client_for(ToldOfTools(template=HERMES, max_context=100)) as client:
        error = (await client.post(path, json=body)).json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded"), error
    assert ("the list of tools has 2" in error["message"]) == (param == "tools"), error
    assert ("The tools alone have " in error["message"]) == (param != "tools"), error


@pytest.mark.parametrize("schema", [{"multipleOf": 99_999_989}, {"multipleOf": 10**400}])
async def test_a_schema_that_cannot_be_enforced_is_refused_by_its_tool(schema: dict[str, Any]) -> None:
    hostile = {"type": "object", "properties": {"a": schema}}
    tools = [TOOL, {"type": "function", "function": {"name": "g", "parameters": hostile, "strict": True}}]
    refused = await ask(fake(CALL), tools=tools, tool_choice="required")
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "tools[1]") and "multipleOf" in error["message"]
