"""OpenAI's API as its own client sees it, and what happens when that client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator
from math import inf
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI, RateLimitError
from starlette.types import Message

import event_loop
from cllm.config import Config
from cllm.engine.params import ContextWindow
from cllm.engine.sampling import TokenLogprob
from cllm.engine.submission import Submission
from cllm.engine.tenant import ANONYMOUS
from cllm.errors import BackendError, OverloadedError
from cllm.generation import Generation
from cllm.server.openai.logprobs import ChatLogprobs, CompletionLogprobs, TokenForm
from cllm.server.openai.replies import ChatReply, CompletionReply
from cllm.text.tokenizer import ByteTokenizer
from http_kit import TrackedApp, app_for, client_for, config_with, served
from scripted_llm import ScriptedLLM

USER = {"role": "user", "content": "hi"}


def openai_client(app: TrackedApp) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{app.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture
async def llm() -> ScriptedLLM:
    return ScriptedLLM()


@pytest.fixture
async def app(llm: ScriptedLLM) -> AsyncIterator[TrackedApp]:
    async with served(llm) as tracked:
        yield tracked


@pytest.fixture
async def client(app: TrackedApp) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(app) as client:
        yield client


async def post(llm: ScriptedLLM, path: str, body: dict[str, Any]) -> Any:
    async with client_for(llm) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def stream(llm: ScriptedLLM, path: str, body: dict[str, Any]) -> list[Any]:
    async with client_for(llm) as client:
        response = await client.post(path, json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response)


# -- completions ---------------------------------------------------------------------------------------------------


async def test_completion(client: AsyncOpenAI, llm: ScriptedLLM) -> None:
    answer = await client.completions.create(model="tiny", prompt="four", max_tokens=5, temperature=0)
    assert answer.id == llm.generations[0].request_id
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 5, 9)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    long = [await client.completions.create(model="tiny", prompt="x" * 40, max_tokens=1) for _ in range(2)]
    details = [each.usage.prompt_tokens_details for each in long if each.usage is not None]
    assert [each.cached_tokens for each in details if each is not None] == [0, 32]


async def test_every_parameter_arrives_in_the_engine() -> None:
    llm = ScriptedLLM(max_context=256)
    await post(
        llm,
        "/v1/completions",
        {
            "prompt": "hi",
            "max_tokens": 9,
            "n": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.2,
            "presence_penalty": 0.3,
            "logit_bias": {"7": -100},
            "seed": 11,
            "logprobs": 3,
            "stop": ["x", "y"],
            "stop_token_ids": [5],
            "ignore_eos": True,
            "min_tokens": 2,
            "context_window": {"keep": 3, "recent": 40},
            "priority": -4,
            "timeout": 2.5,
        },
    )
    params = llm.generations[0].request.params
    assert (params.max_tokens, params.n, params.temperature, params.top_p) == (9, 2, 0.5, 0.9)
    assert (params.top_k, params.min_p, params.repetition_penalty) == (40, 0.1, 1.1)
    assert (params.frequency_penalty, params.presence_penalty, params.logit_bias) == (0.2, 0.3, {7: -100.0})
    assert (params.seed, params.logprobs, params.stop, params.stop_token_ids) == (11, 3, ("x", "y"), [5])
    assert (params.ignore_eos, params.min_tokens) == (True, 2)
    assert params.context_window == ContextWindow(recent=40, keep=3)
    asked = llm.submissions[0]
    assert (asked.priority, asked.timeout_s, asked.tenant, asked.session) == (-4, 2.5, ANONYMOUS, None)
    assert (asked.pins, asked.generated, asked.replica, asked.embeds) == ([], None, None, False)


async def test_null_and_absent_mean_the_default(llm: ScriptedLLM) -> None:
    names = ["max_tokens", "n", "temperature", "top_p", "seed", "stop", "logprobs", "echo", "user", "best_of", "suffix"]
    await post(llm, "/v1/completions", {"prompt": "hi", **dict.fromkeys(names)})
    await post(llm, "/v1/completions", {"prompt": "hi"})
    assert llm.generations[0].request.params == llm.generations[1].request.params
    assert llm.generations[0].request.params.max_tokens == 16
    asked = llm.submissions[0]
    assert (asked.priority, asked.timeout_s, asked.tenant, asked.session) == (0, None, ANONYMOUS, None)
    assert asked.pins == []


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
    ids=["string", "strings", "token ids", "lists of token ids"],
)
async def test_all_forms_of_prompts(llm: ScriptedLLM, prompt: Any, expected: list[list[int]]) -> None:
    body = await post(llm, "/v1/completions", {"prompt": prompt, "max_tokens": 2})
    assert [list(generation.prompt_ids) for generation in llm.generations] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))


@pytest.mark.parametrize("prompt", [["a", "bc"], [[97], [98, 99]]], ids=["strings", "token ids"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_choices_of_several_prompts_are_numbered_through(llm: ScriptedLLM, streamed: bool, prompt: Any) -> None:
    body = {"prompt": prompt, "n": 2, "max_tokens": 3, "echo": True}
    texts = ["", "", "", ""]
    if streamed:
        for event in await stream(llm, "/v1/completions", body):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        answer = await post(llm, "/v1/completions", body)
        texts = [choice["text"] for choice in answer["choices"]]
        assert answer["usage"]["completion_tokens"] == 12
    assert texts == ["aHel", "aHel", "bcHel", "bcHel"]
    assert len({generation.request_id for generation in llm.generations}) == 2


async def test_completion_stream_has_one_event_per_delta_and_the_usage_last(client: AsyncOpenAI) -> None:
    events = [
        event
        async for event in await client.completions.create(
            model="tiny", prompt="hi", max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert [event.choices[0].text for event in events[:-1]] == ["H", "e", "l", "l"]
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None, None, None, "length"]
    assert all(event.usage is None for event in events[:-1])
    assert events[-1].choices == []
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 4
    assert len({event.id for event in events}) == 1


async def test_without_include_usage_no_event_speaks_of_it(llm: ScriptedLLM) -> None:
    events = await stream(llm, "/v1/completions", {"prompt": "hi", "max_tokens": 2})
    assert len(events) == 2
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize("streamed", [False, True])
async def test_completion_logprobs(llm: ScriptedLLM, streamed: bool) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "logprobs": 2}
    if streamed:
        events = await stream(llm, "/v1/completions", body)
        parts = [event["choices"][0]["logprobs"] for event in events]
        merged = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    else:
        merged = (await post(llm, "/v1/completions", body))["choices"][0]["logprobs"]
    top = merged.pop("top_logprobs")
    assert merged == {"tokens": ["H", "e"], "token_logprobs": [0.0, 0.0], "text_offset": [0, 1]}
    assert (top[0].pop("H"), top[1].pop("e")) == (0.0, 0.0)
    assert [next(iter(each.values())) < -50 for each in top] == [True, True]


async def test_whole_and_streamed_answers_are_the_models_of_the_description(llm: ScriptedLLM) -> None:
    """They are written by hand, in pieces; the models are what is documented."""
    llm.says = 'Quote " and \\ and \u2028 and 漢 ' * 2
    sampled = {"n": 2, "max_tokens": 36, "logprobs": 2, "stop_token_ids": [5]}
    completion = await post(llm, "/v1/completions", {"prompt": ["a", "b"], **sampled})
    assert CompletionReply.model_validate(completion).model_dump(exclude_unset=True) == completion
    assert [choice["text"] for choice in completion["choices"]] == [llm.says[:32]] * 4
    chat = await post(llm, "/v1/chat/completions", {"messages": [USER], **sampled, "logprobs": True, "top_logprobs": 1})
    assert ChatReply.model_validate(chat).model_dump(exclude_unset=True) == chat
    assert [choice["message"]["content"] for choice in chat["choices"]] == [llm.says[:32]] * 2


@pytest.mark.single
async def test_a_large_answer_comes_in_slices_and_others_have_their_turn() -> None:
    llm = ScriptedLLM(text="x" * 2_000, max_context=4_000)
    body = json.dumps({"prompt": "hi", "max_tokens": 2_000, "logprobs": 2, "n": 3}).encode()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with llm.running():
        elsewhere = asyncio.ensure_future(others())
        reply = await event_loop.post(app_for(llm), "/v1/completions", body)
        elsewhere.cancel()
    assert [len(choice["text"]) for choice in json.loads(reply.body)["choices"]] == [2_000] * 3
    assert reply.writes > 10
    assert turns > reply.writes


async def test_a_small_answer_says_how_long_it_is(llm: ScriptedLLM) -> None:
    async with client_for(llm) as client:
        response = await client.post("/v1/completions", json={"prompt": "hi"})
    assert response.headers["content-length"] == str(len(response.content))


async def test_best_of_is_named_where_its_log_probabilities_are_too_many() -> None:
    async with client_for(ScriptedLLM(config_with(max_logprobs=10))) as client:
        body = {"prompt": "hi", "best_of": 4, "max_tokens": 3}
        response = await client.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("n", "tokens", "top", "refused"), [(5, 4, 4, False), (5, 4, 5, True), (1, None, 0, False)])
async def test_log_probabilities_of_a_request_are_limited(
    n: int, tokens: int | None, top: int, refused: bool, stream: bool
) -> None:
    llm = ScriptedLLM(config_with(max_logprobs=100))
    chat = {"messages": [USER], "logprobs": True, "top_logprobs": top}
    completion = {"prompt": "hi", "logprobs": top}
    async with client_for(llm) as client:
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", completion)):
            response = await client.post(path, json={**body, "n": n, "max_tokens": tokens, "stream": stream})
            assert (response.status_code == 400) is refused, response.text
            if refused:
                error = response.json()["error"]
                assert error["param"] == ("top_logprobs" if path.startswith("/v1/chat") else "logprobs")
                assert "n = 5 x 4 tokens x 6 log probabilities are 120; at most 100" in error["message"]


async def test_logprobs_0_reports_the_chosen_token_alone(llm: ScriptedLLM) -> None:
    body = await post(llm, "/v1/completions", {"prompt": "hi", "max_tokens": 1, "logprobs": 0})
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"H": 0.0}]


async def test_text_that_json_has_to_escape_survives_a_stream() -> None:
    nasty = 'quote " backslash \\ newline \n tab \t emoji 😀 line \u2028 nul \0'
    events = await stream(ScriptedLLM(text=nasty), "/v1/completions", {"prompt": "hi", "max_tokens": 999})
    assert "".join(event["choices"][0]["text"] for event in events) == nasty


# -- chat ----------------------------------------------------------------------------------------------------------


async def test_chat(client: AsyncOpenAI, llm: ScriptedLLM) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=5
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    message = answer.choices[0].message
    assert (message.role, message.content, answer.choices[0].finish_reason) == ("assistant", "Hello", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("<user>hi")


async def test_chat_stream(client: AsyncOpenAI) -> None:
    events = [
        event
        async for event in await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    texts = {0: "", 1: ""}
    for event in events[:-1]:
        (choice,) = event.choices
        assert choice.delta.role == ("assistant" if not texts[choice.index] else None)
        texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "Hel", 1: "Hel"}
    ends = [event.choices[0].index for event in events[:-1] if event.choices[0].finish_reason == "length"]
    assert sorted(ends) == [0, 1]
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 6


async def test_chat_messages_reach_the_template_as_plain_text(llm: ScriptedLLM) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answered = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "annotations": []}
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}, answered, USER]
    await post(llm, "/v1/chat/completions", {"messages": messages})
    rendered = "<system>be brief<user>one\ntwo<assistant>yes<user>hi"
    assert list(llm.generations[0].prompt_ids) == list(rendered.encode())


async def test_chat_is_unlimited_unless_told(llm: ScriptedLLM) -> None:
    for limit in ({}, {"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}):
        await post(llm, "/v1/chat/completions", {"messages": [USER], **limit})
    assert [generation.request.params.max_tokens for generation in llm.generations] == [None, 7, 7, 7]


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_logprobs(llm: ScriptedLLM, streamed: bool) -> None:
    body = {"messages": [USER], "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
    if streamed:
        event, _end = await stream(llm, "/v1/chat/completions", body)
        logprobs = event["choices"][0]["logprobs"]
    else:
        logprobs = (await post(llm, "/v1/chat/completions", body))["choices"][0]["logprobs"]
    unlikely = logprobs["content"][0]["top_logprobs"].pop()
    likeliest = {"token": "H", "logprob": 0.0, "bytes": [72]}
    assert logprobs == {"content": [{**likeliest, "top_logprobs": [likeliest]}], "refusal": None}
    assert unlikely["logprob"] < -50


def test_what_is_impossible_is_a_number_too() -> None:
    entry = TokenLogprob(72, -inf, [(72, -inf)])
    chat = json.loads("".join(ChatLogprobs(TokenForm(ByteTokenizer())).pieces([entry])))["content"][0]
    assert (chat["logprob"], chat["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    completion = json.loads("".join(CompletionLogprobs(TokenForm(ByteTokenizer())).pieces([entry])))
    assert (completion["token_logprobs"], completion["top_logprobs"]) == ([-9999.0], [{"H": -9999.0}])


async def test_values_that_ask_for_what_happens_anyway_are_taken(llm: ScriptedLLM) -> None:
    harmless = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "metadata": {},
        "service_tier": "auto",
        "reasoning_effort": None,
        "audio": None,
    }
    await post(llm, "/v1/chat/completions", {"messages": [USER], **harmless})
    await post(llm, "/v1/completions", {"prompt": "hi", "n": 2, "best_of": 2, "suffix": ""})
    assert len(llm.generations) == 2


async def test_user_goes_to_the_log_next_to_the_request_id(llm: ScriptedLLM, caplog: pytest.LogCaptureFixture) -> None:
    """At level debug: coding agents send ids of accounts and devices there."""
    with caplog.at_level(logging.DEBUG, "cllm.server"):
        await post(llm, "/v1/completions", {"prompt": "hi", "user": "ann\n"})
        await post(llm, "/v1/chat/completions", {"messages": [USER], "safety_identifier": "bob"})
    first, second = (generation.request_id for generation in llm.generations)
    said = [record for record in caplog.records if "user=" in record.getMessage()]
    assert [record.getMessage() for record in said] == [f"{first} user='ann\\n'", f"{second} user='bob'"]
    assert {record.levelno for record in said} == {logging.DEBUG}


# -- models --------------------------------------------------------------------------------------------------------


async def test_models(client: AsyncOpenAI) -> None:
    listed = [model async for model in client.models.list()]
    assert [model.id for model in listed] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_an_alias_is_shown_and_all_names_are_taken() -> None:
    llm = ScriptedLLM(Config.model_validate({"model": {"name": "org/file.gguf", "alias": "best"}}))
    async with client_for(llm) as client:
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["best"]
        for name in ("best", "org/file.gguf"):
            assert (await client.get(f"/v1/models/{name}")).json()["id"] == "best"
            answer = await client.post("/v1/completions", json={"prompt": "hi", "model": name})
            assert answer.json()["model"] == "best"
        assert (await client.get("/v1/models/other")).status_code == 404


# -- errors, as the client raises them -----------------------------------------------------------------------------


async def test_overload_is_a_rate_limit_error_with_a_time_to_wait(client: AsyncOpenAI, llm: ScriptedLLM) -> None:
    llm.failure = OverloadedError("full", retry_after_s=3)
    with pytest.raises(RateLimitError) as raised:
        await client.completions.create(model="tiny", prompt="hi")
    assert raised.value.response.headers["retry-after"] == "3"
    assert raised.value.code == "queue_full"
    assert raised.value.request_id


async def test_an_error_in_a_stream_raises_in_the_client(client: AsyncOpenAI, llm: ScriptedLLM) -> None:
    llm.fail(BackendError("it broke"), after=2)
    text = ""
    with pytest.raises(APIError, match="it broke"):
        async for event in await client.completions.create(model="tiny", prompt="hi", stream=True):
            text += event.choices[0].text
    assert text == "He"


# -- clients that leave --------------------------------------------------------------------------------------------

ENDPOINTS = [
    ("/v1/completions", {"prompt": "hi", "stream": True}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": ["hi", "you"], "n": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": [USER], "stream": True}),
    ("/v1/chat/completions", {"messages": [USER]}),
    ("/generate", {"prompt": "hi"}),
    ("/generate_stream", {"prompt": "hi"}),
    ("/benchmark", {"requests": 8, "concurrency": 4}),
]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.parametrize("tokens", [0, 3], ids=["before the first token", "in the middle"])
async def test_a_client_that_leaves_stops_its_generations(path: str, body: dict[str, Any], tokens: int) -> None:
    llm = ScriptedLLM(steps=tokens)
    async with served(llm) as app, httpx.AsyncClient(base_url=app.url) as client:
        asking = asyncio.ensure_future(client.post(path, json=body))
        await llm.starved.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await app.idle.wait()
        assert sum(generation.completion_tokens for generation in llm.generations) >= tokens
        assert app.leftovers() == []


async def test_leaving_a_stream_half_read_stops_its_generation(client: AsyncOpenAI, app: TrackedApp) -> None:
    llm: ScriptedLLM = app.app.state.cllm.serves.default.llm
    llm.hold(2)
    stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
    async for event in stream:
        assert event.choices[0].text == "H"
        break
    await stream.close()
    await app.idle.wait()
    assert app.leftovers() == []


async def test_nothing_is_left_after_a_normal_end(client: AsyncOpenAI, app: TrackedApp, llm: ScriptedLLM) -> None:
    await client.completions.create(model="tiny", prompt="hi")
    async for _ in await client.completions.create(model="tiny", prompt="hi", stream=True):
        pass
    await app.idle.wait()
    assert app.leftovers() == []


async def test_a_server_that_is_cancelled_closes_its_generations() -> None:
    llm = ScriptedLLM(steps=0)
    async with client_for(llm) as client:
        asking = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "hi", "stream": True}))
        await llm.submitted.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await llm.idle()


# -- the wire ------------------------------------------------------------------------------------------------------


async def asgi_stream(llm: ScriptedLLM, on_body: Any = None) -> list[Message]:
    """Messages of one streamed answer; `on_body` is awaited with every body message, like a slow socket."""
    body = json.dumps({"prompt": "hi", "max_tokens": 6, "stream": True}).encode()
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        return requests.pop() if requests else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Message) -> None:
        sent.append(message)
        if on_body is not None and message["type"] == "http.response.body":
            await on_body(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    async with llm.running():
        await app_for(llm)(scope, receive, send)
    return sent


class Prompt(ScriptedLLM):
    """Has computed all of an answer when `queue` returns."""

    def queue(self, submission: Submission) -> Generation:
        generation = super().queue(submission)
        while not self.executor.snapshot().finished.get("length"):
            time.sleep(0.001)
        return generation


@pytest.mark.single  # over a link, the last ones may come a moment later
async def test_deltas_that_wait_share_one_write() -> None:
    start, first, end = await asgi_stream(Prompt())
    assert start["type"] == "http.response.start"
    assert first["body"].count(b"data: ") == 6
    assert end["body"] == b"data: [DONE]\n\n"


async def test_a_slow_socket_gets_fewer_and_larger_writes() -> None:
    llm = ScriptedLLM(steps=1)

    async def first_is_slow(message: Message) -> None:
        if message["body"].count(b'"text":"H"'):
            for _ in range(5):
                llm.release(1)
            while llm.generations[0].completion_tokens < 6:
                await asyncio.sleep(0)

    bodies = [message["body"].count(b"data: ") for message in (await asgi_stream(llm, first_is_slow))[1:]]
    assert bodies == [1, 5, 1]


async def test_a_long_prompt_is_tokenised_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(Config.model_validate({"resources": {"kv_cache_max_memory_mb": 8}}), max_context=60_000)
    threads: dict[int, bool] = {}

    def encode(text: str, **_: bool) -> list[int]:
        threads[len(text)] = threading.current_thread() is threading.main_thread()
        return [1]

    async with client_for(llm) as client:
        monkeypatch.setattr(llm.text.tokenizer, "encode", encode)
        for size in (10, 50_000):
            await client.post("/v1/completions", json={"prompt": "x" * size})
    assert threads == {10: True, 50_000: False}


async def test_prompts_times_n_is_limited() -> None:
    llm = ScriptedLLM(config_with(max_prompts=4))
    async with client_for(llm) as client:
        fits = await client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})
        too_many = await client.post("/v1/completions", json={"prompt": ["a", "b", "c"], "n": 2})
    assert (fits.status_code, too_many.status_code) == (200, 400)
    assert "server.max_prompts" in too_many.json()["error"]["message"]
