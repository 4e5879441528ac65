"""What cannot change an answer is taken; what is refused is refused with all its problems at once, and logged."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from cllm.server import errors
from cllm.server.schema.validation import MOST_PROBLEMS
from http_kit import client_for
from scripted_llm import ScriptedLLM

COMPLETION: dict[str, Any] = {"prompt": "hi"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
HINTS: dict[str, Any] = {
    "prompt_cache_key": "agent-7",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"scope": "organization"},
    "metadata": {"run": "5"},
    "store": True,
    "service_tier": "priority",
    "prediction": {"type": "content", "content": "hi"},
    "cache_prompt": True,
    "id_slot": -1,
    "dry_base": 1.75,
    "sse_ping_interval": 5,
    "a_field_of_a_newer_client": None,
}


async def post(llm: ScriptedLLM, path: str, body: dict[str, Any]) -> httpx.Response:
    async with client_for(llm) as client:
        return await client.post(path, json=body)


@pytest.mark.parametrize("path", BODIES)
async def test_hints_change_nothing(path: str) -> None:
    llm = ScriptedLLM()
    plain = await post(llm, path, BODIES[path])
    hinted = await post(llm, path, {**BODIES[path], **HINTS})
    assert (plain.status_code, hinted.status_code) == (200, 200), hinted.text
    assert plain.json()["choices"] == hinted.json()["choices"]
    assert llm.generations[0].request.params == llm.generations[1].request.params


async def test_hints_of_chats_and_streams() -> None:
    body = {**CHAT, "verbosity": "low", "safety_identifier": "me", "stream": True}
    response = await post(
        ScriptedLLM(), "/v1/chat/completions", {**body, "stream_options": {"include_obfuscation": True}}
    )
    assert response.status_code == 200, response.text
    assert "obfuscation" not in response.text


async def test_the_name_of_a_speaker_reaches_the_template() -> None:
    seen: list[Any] = []

    class Listening(ScriptedLLM):
        async def encode_chat(self, messages: Any, *others: Any) -> list[int]:
            seen.extend(messages)
            return await super().encode_chat(messages, *others)

    body = {"messages": [{"role": "user", "content": "hi", "name": "Ann"}]}
    assert (await post(Listening(), "/v1/chat/completions", body)).status_code == 200
    assert seen == [{"role": "user", "content": "hi", "name": "Ann"}]


async def test_all_problems_are_in_one_answer() -> None:
    body = {
        **CHAT,
        "temperature": "hot",
        "top_p": 7,
        "audio": {"voice": "x"},
        "no_such_thing": 1,
        "messages": [{"role": "user", "content": "hi", "mood": "good", "tone": "low"}],
    }
    error = (await post(ScriptedLLM(), "/v1/chat/completions", body)).json()["error"]
    assert error["param"] == "temperature"
    for said in (
        "temperature must be a valid number, not 'hot'.",
        "top_p is 7.0; it must be more than 0.0 and at most 1.0.",
        "audio is not supported by this server; leave it out.",
        "no_such_thing is not a parameter of this request.",
        "messages[0].mood is not a parameter of this request.",
        "messages[0].tone is not a parameter of this request.",
    ):
        assert said in error["message"]


async def test_contradictions_are_found_together_with_unknown_keys() -> None:
    body = {**CHAT, "top_logprobs": 2, "max_tokens": 3, "max_completion_tokens": 4, "what": 1}
    message = (await post(ScriptedLLM(), "/v1/chat/completions", body)).json()["error"]["message"]
    assert message == (
        "top_logprobs is only allowed together with logprobs = true. "
        "max_tokens is 3, but max_completion_tokens is 4; send one of them. "
        "what is not a parameter of this request."
    )


async def test_contradictions_are_found_beside_wrong_values_but_not_because_of_them() -> None:
    body = {**CHAT, "temperature": "hot", "tool_choice": "required", "stream_options": {}, "functions": [{"name": "f"}]}
    message = (await post(ScriptedLLM(), "/v1/chat/completions", body)).json()["error"]["message"]
    assert message == (
        "temperature must be a valid number, not 'hot'. "
        "stream_options is only allowed together with stream = true. "
        "tool_choice is only allowed together with tools. "
        "functions is not supported by this server; send tools instead."
    )
    wrong = {**CHAT, "logprobs": "yes", "top_logprobs": 2}
    message = (await post(ScriptedLLM(), "/v1/chat/completions", wrong)).json()["error"]["message"]
    assert message == "logprobs must be a valid boolean, not 'yes'."


async def test_all_problems_of_a_message_and_of_its_calls() -> None:
    body = {"messages": [{"role": "wizard", "content": 3}]}
    message = (await post(ScriptedLLM(), "/v1/chat/completions", body)).json()["error"]["message"]
    assert "messages[0].role must be 'system'" in message and "messages[0].content must be a string" in message
    result = {"role": "tool", "tool_call_id": "7", "content": "sunny"}
    body = {"messages": [*CHAT["messages"], result], "top_logprobs": 1}
    message = (await post(ScriptedLLM(), "/v1/chat/completions", body)).json()["error"]["message"]
    assert message == (
        "messages[1].tool_call_id is that of no call before it: '7'. "
        "top_logprobs is only allowed together with logprobs = true."
    )


async def test_a_part_of_another_kind_is_one_problem() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    body = {"messages": [{"role": "user", "content": [image]}]}
    message = (await post(ScriptedLLM(), "/v1/chat/completions", body)).json()["error"]["message"]
    said = "messages[0].content[0].type must be 'text', not 'image_url'; this server supports no other parts."
    assert message == said
    custom = {**CHAT, "tools": [{"type": "custom", "custom": {"name": "x"}}]}
    message = (await post(ScriptedLLM(), "/v1/chat/completions", custom)).json()["error"]["message"]
    assert message == "tools[0].type is 'custom'; it must be 'function'; this server supports no other kind of tool."


async def test_a_list_of_problems_has_an_end() -> None:
    body = {**COMPLETION, **{f"k{number}": 1 for number in range(100)}, "temperature": "hot"}
    message = (await post(ScriptedLLM(), "/v1/completions", body)).json()["error"]["message"]
    assert message.count("is not a parameter") == MOST_PROBLEMS - 1
    assert message.endswith("There are more errors.")


async def test_each_refusal_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cllm.server"):
        async with client_for(ScriptedLLM()) as client:
            headers = {"x-request-id": "mine"}
            await client.post("/v1/completions", json={**COMPLETION, "mood\n": 1}, headers=headers)
            await client.get("/v1/nothing", headers=headers)
            await client.post("/v1/completions", json=COMPLETION, headers=headers)
    assert [record.getMessage() for record in caplog.records] == [
        "refused mine: 400 for POST /v1/completions: mood\n is not a parameter of this request.",
        "refused mine: 404 for GET /v1/nothing: Unknown endpoint: /v1/nothing. GET /docs lists all endpoints.",
    ]


def test_a_flood_of_refusals_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = errors._RefusalLog(lambda: now)
    with caplog.at_level(logging.WARNING, "cllm.server"):
        for _ in range(100):
            log.note(400, "POST /x", "id", "wrong")
        assert len(caplog.records) == log.MOST
        now = 1.0
        log.note(400, "POST /x", "id", "wrong")
    assert caplog.records[log.MOST].getMessage() == "80 more refusals were not logged"
    assert len(caplog.records) == log.MOST + 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 65}, "prompt"),
        ("/v1/completions", {"prompt": [120] * 65}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 1_000_000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1000}]}, "messages"),
        ("/generate", {"prompt": "x" * 65}, "prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_too_long_a_prompt_is_said_in_the_words_that_clients_look_for(
    path: str, body: dict[str, Any], param: str
) -> None:
    response = await post(ScriptedLLM(), path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["message"].startswith("This model's maximum context length is 65 tokens")
