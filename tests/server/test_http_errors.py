"""Bad input, overload and failure over HTTP: the right status, the right body, the parameter by name."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from starlette.types import Message

from cllm.errors import (
    BackendError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    ShuttingDownError,
)
from cllm.server.middleware import RequestContext
from cllm.server.schema import body as bodies
from cllm.server.schema.invalid import describe_invalid
from cllm.server.schema.validation import MOST_PROBLEMS
from http_kit import client_for, config_with, served
from scripted_llm import ScriptedLLM

COMPLETION = {"prompt": "hi"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
GENERATING = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/generate": COMPLETION}
JSON = {"content-type": "application/json"}
NAN = float("nan")


async def post(llm: ScriptedLLM, path: str, body: Any, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client_for(llm) as client:
        return await client.post(path, content=content, headers={**JSON, **options.get("headers", {})})


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) in ({"error"}, {"success", "error"})
    assert body.get("success", False) is False
    numbers = {"n_prompt_tokens", "n_ctx"} if body["error"]["code"] == "context_length_exceeded" else set()
    assert set(body["error"]) == {"message", "type", "param", "code"} | numbers
    assert response.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


SHARED = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": True}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 10**400}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 10, "max_tokens": 5}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["a"] * 10_000}, "stop"),
    ({"stop": "\ud800"}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"logit_bias": {"one": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"\ud800": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": NAN}}, "logit_bias"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": NAN}, "timeout"),
    ({"priority": "high"}, "priority"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"no_such_thing": 1}, "no_such_thing"),
    ({"with-dash": 1}, "with-dash"),
]

COMPLETIONS = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 3, "prompt": ["hi"] * 50}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [[1], [2.5]]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["hi", ""]}, "prompt"),
    ({"prompt": "x" * 65}, "prompt"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"every": 5}}, "stream_options.every"),
    ({"user": "x" * 257}, "user"),
]

USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "42"}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


CHATS = [
    ({"n": 0}, "n"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL, CALL]}]}, "messages[0].tool_calls[1].id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}]}, "messages[0].tool_calls[0].id"),
    ({"messages": [USER, RESULT]}, "messages[1].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}, RESULT, RESULT]}, "messages[2].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}, RESULT, USER, RESULT]}, "messages[3].tool_call_id"),
    ({"messages": [{**USER, "reasoning_content": "x"}]}, "messages[0].reasoning_content"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{**USER, "name": 5}]}, "messages[0].name"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{**USER, "mood": "good"}]}, "messages[0].mood"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": 4, "max_tokens": 5}, "max_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 129)]}, "tools[0].function.name"),
    ({"tools": [tool("f"), tool("odd name")]}, "tools[1].function.name"),
    ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
    ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", parameters={"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [tool("f", mood=1)]}, "tools[0].function.mood"),
    ({"tools": [tool(f"f{number}") for number in range(513)]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes", "tools": [tool("f")]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool("f")]}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"separate_reasoning": True, "reasoning_format": "none"}, "reasoning_format"),
    ({"response_format": {"type": "poem"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"reasoning_effort": "utmost"}, "reasoning_effort"),
]


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(("change", "param"), SHARED, ids=lambda value: repr(value)[:40])
async def test_bad_sampling_parameter_is_named_everywhere(path: str, change: dict[str, Any], param: str) -> None:
    llm = ScriptedLLM()
    response = await post(llm, path, {**GENERATING[path], **change})
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param)
    assert param.split("[")[0] in error["message"]
    assert not llm.generations


@pytest.mark.parametrize(("change", "param"), COMPLETIONS, ids=lambda value: repr(value)[:40])
async def test_bad_completion_parameter_is_named(change: dict[str, Any], param: str) -> None:
    llm = ScriptedLLM()
    response = await post(llm, "/v1/completions", {**COMPLETION, **change})
    assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize(("change", "param"), CHATS, ids=lambda value: repr(value)[:40])
async def test_bad_chat_parameter_is_named(change: dict[str, Any], param: str) -> None:
    response = await post(ScriptedLLM(), "/v1/chat/completions", {**CHAT, **change})
    assert (response.status_code, error_of(response)["param"]) == (400, param)


async def test_what_is_unsupported_says_so() -> None:
    response = await post(ScriptedLLM(), "/v1/chat/completions", {**CHAT, "modalities": ["audio"]})
    assert error_of(response)["message"] == (
        'modalities is not supported by this server; leave it out or send ["text"].'
    )


@pytest.mark.parametrize(
    ("path", "advice"),
    [("/v1/completions", "logprobs"), ("/v1/chat/completions", "logprobs = true and top_logprobs")],
)
async def test_what_has_another_name_here_is_told_it(path: str, advice: str) -> None:
    response = await post(ScriptedLLM(), path, {**GENERATING[path], "n_probs": 3})
    assert error_of(response)["message"] == f"n_probs is not supported by this server; send {advice} instead."


PROMPTS = "a string, a list of strings, a list of token ids or a list of lists of token ids"
INPUTS = "a string, a list of token ids and strings, or a list of several of these"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"prompt": ["a", 1]}, f"prompt must be {PROMPTS}, not ['a', 1]."),
        ("/v1/completions", {"prompt": "a", "stop": [1]}, "stop must be a string or a list of strings, not [1]."),
        ("/v1/embeddings", {"input": 5}, f"input must be {INPUTS}, not 5."),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["b", 5]},
            "documents[1] must be a string or an object with a text, not 5.",
        ),
        ("/v1/responses", {"input": 5}, "input must be a string or a list of items, at least one, not 5."),
        (
            "/v1/chat/completions",
            {**CHAT, "json_schema": 5},
            "json_schema must be a JSON schema: an object, or its text, not 5.",
        ),
    ],
)
async def test_what_a_parameter_may_be_is_named(path: str, body: dict[str, Any], said: str) -> None:
    assert error_of(await post(ScriptedLLM(), path, body))["message"] == said


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "hi"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": "hi", "top_k": ' + b"1" * 5000 + b"}",
        b'{"prompt": "hi", "\\ud800": 1}',
    ],
    ids=lambda body: repr(body[:20]),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_what_is_not_a_json_object_is_refused(path: str, body: bytes) -> None:
    response = await post(ScriptedLLM(), path, body)
    assert response.status_code == 400
    assert error_of(response)["message"]


async def test_broken_json_says_where() -> None:
    error = error_of(await post(ScriptedLLM(), "/v1/completions", b'{"prompt": }'))
    assert "not valid JSON" in error["message"]
    assert "character 11" in error["message"]


async def test_a_form_instead_of_json_is_told_what_to_send() -> None:
    response = await post(
        ScriptedLLM(), "/generate", b"prompt=hi", headers={"content-type": "application/x-www-form-urlencoded"}
    )
    assert response.status_code == 400
    assert "application/json" in error_of(response)["message"]


async def test_long_values_and_keys_are_not_echoed_whole() -> None:
    for body in ({"prompt": "hi", "k" * 100_000: 1}, {"prompt": "hi", "temperature": "x" * 100_000}):
        response = await post(ScriptedLLM(), "/v1/completions", body)
        assert response.status_code == 400
        assert len(response.content) < 500


async def test_nul_bytes_are_text_like_any_other() -> None:
    llm = ScriptedLLM()
    assert (await post(llm, "/v1/completions", {"prompt": "a\0b"})).status_code == 200
    assert list(llm.generations[0].prompt_ids) == [97, 0, 98]


async def test_a_megabyte_of_prompt_is_refused_with_both_numbers() -> None:
    response = await post(ScriptedLLM(), "/v1/completions", {"prompt": "x" * 1_000_000})
    message = error_of(response)["message"]
    assert response.status_code == 400
    assert "1000000" in message
    assert "65" in message


async def test_unknown_model_is_404_with_the_known_names() -> None:
    response = await post(ScriptedLLM(), "/v1/completions", {**COMPLETION, "model": "gpt-9"})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'tiny'" in error["message"]


async def test_unknown_path_and_wrong_method_have_the_same_form() -> None:
    async with client_for(ScriptedLLM()) as client:
        missing = await client.get("/v1/nothing")
        wrong = await client.get("/v1/completions")
        own = await client.get("/generate")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert own.json()["success"] is False


FAILURES = [
    (InvalidRequestError("too odd", "prompt"), 400, "prompt"),
    (OverloadedError("full", retry_after_s=2.4), 429, None),
    (RequestTimeoutError("too late"), 408, None),
    (ShuttingDownError("going"), 503, None),
    (BackendError("it broke"), 500, None),
]


@pytest.mark.parametrize(("failure", "status", "param"), FAILURES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("fail_at", [None, 0], ids=["at submit", "while waiting"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_failure_before_the_first_token_has_its_status(
    failure: Exception, status: int, param: str | None, fail_at: int | None, stream: bool
) -> None:
    llm = ScriptedLLM(failure=failure, fail_after=fail_at)
    response = await post(llm, "/v1/completions", {**COMPLETION, "stream": stream})
    error = error_of(response)
    assert (response.status_code, error["param"], error["message"]) == (status, param, str(failure))
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_retry_after_is_in_whole_seconds_rounded_up() -> None:
    full = await post(ScriptedLLM(failure=OverloadedError("full", retry_after_s=2.4)), "/generate", COMPLETION)
    going = await post(ScriptedLLM(failure=ShuttingDownError("going")), "/generate", COMPLETION)
    assert (full.headers["retry-after"], going.headers["retry-after"]) == ("3", "10")
    assert full.json()["success"] is False


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate_stream"])
async def test_failure_in_a_stream_is_an_event_and_the_end(path: str) -> None:
    llm = ScriptedLLM(failure=BackendError("it broke"), fail_after=2)
    body = {**(CHAT if "chat" in path else COMPLETION)}
    if path.startswith("/v1"):
        body["stream"] = True
    response = await post(llm, path, body)
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert response.status_code == 200
    assert len(events) == 3
    last = json.loads(events[-1])
    assert last["error"]["message"] == "it broke"
    assert last.get("success") is (False if path == "/generate_stream" else None)


async def test_a_failure_does_not_overtake_tokens_that_came_before_anybody_looked() -> None:
    llm = ScriptedLLM(failure=BackendError("it broke"), fail_after=2)
    async with llm.running():
        generation = llm.submit("hi")
        while not generation.done:
            await asyncio.sleep(0.001)
        await llm.confirm([generation])
        assert (await anext(generation)).text == "H"
        assert (await anext(generation)).text == "e"
        with pytest.raises(BackendError, match="it broke"):
            await anext(generation)


@pytest.mark.parametrize("fail_at", [None, 0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_unexpected_failure_shows_its_request_id_and_nothing_else(
    fail_at: int | None, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    llm = ScriptedLLM(failure=KeyError("secret detail"), fail_after=fail_at)
    with caplog.at_level(logging.ERROR, "cllm.server"):
        response = await post(
            llm, "/v1/completions", {**COMPLETION, "stream": stream}, headers={"x-request-id": "my-id"}
        )
    assert response.status_code == (200 if stream and fail_at == 2 else 500)
    assert response.headers["x-request-id"] == "my-id"
    assert "secret detail" not in response.text
    assert "my-id" in response.text
    assert "secret detail" in caplog.text


async def test_a_failure_closes_what_was_already_submitted() -> None:
    llm = ScriptedLLM()
    response = await post(llm, "/v1/completions", {"prompt": ["good", ""]})
    assert response.status_code == 400
    assert len(llm.generations) == 1


async def test_announced_body_over_the_limit_is_refused_unread() -> None:
    response = await post(ScriptedLLM(config_with(max_body_bytes=1024)), "/v1/completions", {"prompt": "x" * 2000})
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


async def test_unannounced_body_over_the_limit_is_cut_off() -> None:
    pulled = 0

    async def endless() -> Any:
        nonlocal pulled
        for _ in range(1000):
            pulled += 1
            yield b"x" * 500

    async with client_for(ScriptedLLM(config_with(max_body_bytes=1024))) as client:
        response = await client.post("/generate", content=endless(), headers=JSON)
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
    assert pulled == 3


async def test_too_large_body_over_a_real_connection() -> None:
    async with (
        served(ScriptedLLM(config_with(max_body_bytes=1024))) as app,
        httpx.AsyncClient(base_url=app.url) as client,
    ):
        response = await client.post("/generate", content=b"x" * 2000, headers=JSON)
        assert response.status_code == 413
        assert (await client.get("/health")).status_code == 200


async def test_api_key_opens_everything_but_monitoring_needs_none() -> None:
    llm = ScriptedLLM(config_with(api_key="sëcret"))
    async with client_for(llm) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200
        for header in (None, "Bearer wrong", "Bearer", "Basic secret", "Bearer \xff"):
            headers = [] if header is None else [(b"authorization", header.encode("latin-1"))]
            refused = await client.get("/v1/models", headers=headers)
            assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
        right = await client.get("/v1/models", headers=[(b"authorization", "Bearer sëcret".encode())])
        assert right.status_code == 200


async def test_browsers_of_configured_origins_may_call() -> None:
    llm = ScriptedLLM(config_with(cors_origins=["https://app.example"], api_key="secret"))
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with client_for(llm) as client:
        good = await client.options("/v1/completions", headers={"origin": "https://app.example", **asking})
        bad = await client.options("/v1/completions", headers={"origin": "https://evil.example", **asking})
        refused = await client.get("/v1/models", headers={"origin": "https://app.example"})
    assert good.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" not in bad.headers
    # A page can only show the error if the refusal carries the header too.
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize(
    ("sent", "taken"), [("abc-1.2:x_Y", True), ("a" * 128, True), ("a" * 129, False), ("", False), ("a b", False)]
)
async def test_request_id_is_taken_over_if_sane(sent: str, taken: bool) -> None:
    llm = ScriptedLLM()
    response = await post(llm, "/v1/completions", COMPLETION, headers={"x-request-id": sent})
    assert (response.headers["x-request-id"] == sent) is taken
    assert response.json()["id"].startswith(f"cmpl-{response.headers['x-request-id']}")


async def test_a_repeated_request_id_still_makes_unique_requests() -> None:
    llm = ScriptedLLM()
    async with client_for(llm) as client:
        for _ in range(2):
            response = await client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "same"})
            assert response.status_code == 200
    first, second = (generation.request_id for generation in llm.generations)
    assert first != second


async def test_a_crash_after_the_answer_began_is_not_hidden() -> None:
    """The connection has to break: a cut-off answer must not look complete."""

    async def breaks_off(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("half way")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/", "method": "GET", "headers": []}
    with pytest.raises(ValueError, match="half way"):
        await RequestContext(breaks_off)(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["http.response.start"]


def huge(count: int) -> list[tuple[str, dict[str, Any], str]]:
    """Bodies of nothing but mistakes, and the parameter to blame."""
    part = {"role": "user", "content": [{"type": "text"}] * count}
    return [
        ("/v1/completions", {"prompt": [*[5] * count, "a"]}, "prompt"),
        ("/v1/completions", {"prompt": "x", "stop": [1] * count}, "stop"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": ["a"] * count}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "x", **{f"k{number}": 1 for number in range(count)}}, "k0"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(n): "a" for n in range(count)}}, "logit_bias"),
        ("/v1/chat/completions", {"messages": [1] * count}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * count}, "messages"),
        ("/v1/chat/completions", {"messages": [part]}, "messages[0].content[0].text"),
    ]


@pytest.mark.parametrize(("path", "body", "param"), huge(20_000), ids=lambda value: str(value)[:30])
async def test_thousands_of_mistakes_are_one_error(
    path: str, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Describing every one of them would hold up everybody else for seconds."""
    described: list[int] = []

    def counted(found: Any) -> Any:
        described.append(len(found))
        return describe_invalid(found)

    monkeypatch.setattr(bodies, "describe_invalid", counted)
    response = await post(ScriptedLLM(), path, body)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert sum(described) <= MOST_PROBLEMS
    assert len(response.content) < 700


async def test_a_compressed_body_is_refused_as_that() -> None:
    response = await post(ScriptedLLM(), "/v1/completions", b"\x1f\x8b\x08", headers={"content-encoding": "gzip"})
    assert response.status_code == 400
    assert error_of(response)["message"] == "The body is compressed (gzip); send it without Content-Encoding."


async def test_a_name_that_is_too_long_is_refused_in_one_clear_line() -> None:
    response = await post(ScriptedLLM(), "/v1/completions", {**COMPLETION, "user": "a" * 1000})
    assert response.status_code == 400
    assert error_of(response)["message"] == "user has more than 256 characters."


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
async def test_the_bounds_of_a_seed_are_exact(seed: int) -> None:
    async with client_for(ScriptedLLM()) as client:
        response = await client.post("/v1/completions", json={"prompt": "hi", "seed": seed})
    assert str(max(-(2**63), min(seed, 2**63 - 1))) in response.json()["error"]["message"]
