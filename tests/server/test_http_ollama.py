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
from scripted_chat import SPOKEN, TEMPLATE
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
    templated = (await client.post("/api/generate", json={**body, "prompt": "<bos>hi<eos>", "raw": True})).json()
    assert templated["prompt_eval_count"] == 4
    loads = (await client.post("/api/generate", json={"model": "fake"})).json()
    assert (loads["done"], loads["done_reason"], loads["response"]) == (True, "load", "")


async def test_what_there_is(client: httpx.AsyncClient) -> None:
    (model,) = (await client.get("/api/tags")).json()["models"]
    assert model["name"] == model["model"] == "fake"
    shown = (await client.post("/api/show", json={"model": model["name"]})).json()
    assert shown["capabilities"] == ["completion", "tools", "embedding"]
    assert shown["model_info"]["fake.context_length"] == 4096
    by_old_name = await client.post("/api/show", json={"name": "fake:latest"})
    assert by_old_name.json()["model_info"] == shown["model_info"]
    assert (await client.post("/api/show", json={})).json() == {"error": "model is missing."}
    (running,) = (await client.get("/api/ps")).json()["models"]
    assert (running["name"], running["context_length"]) == ("fake", 4096)
    assert (await client.get("/api/version")).json() == {"version": cllm.__version__}


async def test_a_model_that_is_there_is_pulled_at_once(client: httpx.AsyncClient) -> None:
    pulled = await client.post("/api/pull", json={"model": "fake:latest", "insecure": True})
    assert [json.loads(line)["status"] for line in pulled.text.splitlines()] == ["pulling manifest", "success"]
    assert pulled.headers["content-type"] == "application/x-ndjson"
    assert (await client.post("/api/pull", json={"name": "fake", "stream": False})).json() == {"status": "success"}
    missing = await client.post("/api/pull", json={"model": "llama3"})
    assert (missing.status_code, "'llama3' does not exist" in missing.json()["error"]) == (404, True)
    assert (await client.post("/api/pull", json={})).status_code == 400


async def test_any_content_type_will_do_but_not_from_a_web_page(client: httpx.AsyncClient) -> None:
    """curl's default is that of forms, and litellm sends none."""
    body = json.dumps({**CHAT, **SHORT, "stream": False})
    form = {"content-type": "application/x-www-form-urlencoded"}
    for headers in ({}, form):
        assert (await client.post("/api/chat", content=body, headers=headers)).json()["done"]
    refused = await client.post("/api/chat", content=body, headers={**form, "origin": "http://elsewhere"})
    assert refused.status_code == 400 and "content-type: application/json" in refused.json()["error"]


async def test_errors_are_a_message(client: httpx.AsyncClient) -> None:
    for change, status, said in (
        ({"model": "gpt-9"}, 404, "'gpt-9' does not exist"),
        ({"tools": [{}]}, 400, "tools[0].type is missing; it must be 'function'"),
        ({"think": True}, 400, "fake does not reason"),
        ({"top_logprobs": 2}, 400, "top_logprobs is only allowed together with logprobs"),
        ({"messages": [{"role": "user", "images": ["aGk="]}]}, 400, "messages[0].images is not supported"),
        ({"messages": [{"role": "user", "tool_name": "a"}]}, 400, "messages[0].tool_name is only allowed in messages"),
        ({"messages": [{"role": "tool", "tool_name": "a"}]}, 400, "messages[0].tool_name is 'a', but no such call"),
        ({"truncate": True}, 400, "truncate is not supported"),
        ({"options": {"mirostat": 2}}, 400, "options.mirostat is not supported"),
        ({"options": {"temperature": -1}}, 400, "options.temperature is -1.0"),
        ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, 400, "options.repeat_last_n is 64, but repeat_pen"),
        ({"options": {"stop": 5}}, 400, "options.stop must be a string or a list of strings, not 5."),
        ({"think": "extreme"}, 400, "think must be true, false, 'low', 'medium', 'high' or 'max', not 'extreme'."),
        ({"format": 5}, 400, "format must be 'json' or a JSON schema, which is an object, not 5."),
    ):
        refused = await client.post("/api/chat", json={**CHAT, **change})
        assert refused.status_code == status
        assert said in refused.json()["error"]


@pytest.mark.parametrize(
    "options",
    [{"repeat_last_n": -1, "repeat_penalty": 1.1}, {"repeat_last_n": 64}, {"repeat_last_n": 0, "repeat_penalty": 1.0}],
)
async def test_how_far_back_a_penalty_looks_may_be_said_where_it_changes_nothing(
    client: httpx.AsyncClient, options: dict[str, Any]
) -> None:
    without = {name: value for name, value in options.items() if name != "repeat_last_n"}
    said, unsaid = [
        await client.post("/api/chat", json={**CHAT, "stream": False, "options": {**SHORT["options"], **each}})
        for each in (options, without)
    ]
    assert said.status_code == 200 and said.json()["message"] == unsaid.json()["message"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"raw": True, "system": "Be kind."}, "system is not allowed together with raw"),
        ({"suffix": "b", "think": False, "system": "a"}, "system is not allowed together with suffix"),
        ({"suffix": "b"}, "suffix is not supported by this model"),
    ],
)
async def test_what_cannot_be_done_without_the_template_is_refused(
    client: httpx.AsyncClient, change: dict[str, Any], said: str
) -> None:
    refused = await client.post("/api/generate", json={"model": "fake", "prompt": "hi", **change})
    assert refused.status_code == 400 and said in refused.json()["error"]


# -- tools and reasoning -----------------------------------------------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")
]


async def post(llm: ScriptedLLM, **body: Any) -> httpx.Response:
    async with client_for(llm) as client:
        return await client.post("/api/chat", json={**CHAT, "model": "tiny", "tools": TOOLS, **body})


async def test_calls_are_whole_and_reasoning_is_apart() -> None:
    llm = ScriptedLLM(max_context=4096, template=TEMPLATE, text=SPOKEN)
    whole = (await post(llm, stream=False, think=True)).json()
    message = whole["message"]
    assert (message["thinking"].strip(), message["content"].strip()) == ("Hm.", "I look.")
    (call,) = message["tool_calls"]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Paris"}}
    assert whole["done_reason"] == "stop"
    assert llm.asked[0][1].arguments == {"enable_thinking": True}
    assert [tool["function"]["name"] for tool in llm.asked[0][1].tools] == ["weather", "time"]
    *pieces, last = lines(await post(llm, think="high"))
    assert llm.asked[1][1].arguments == {"enable_thinking": True, "reasoning_effort": "high"}
    said = [piece["message"] for piece in pieces]
    for name in ("thinking", "content"):
        assert "".join(each.get(name, "") for each in said) == message[name]
    ((streamed,),) = [each["tool_calls"] for each in said if "tool_calls" in each]
    assert streamed["function"] == call["function"] and last["message"]["content"] == ""
    assert last["done_reason"] == "stop"


async def test_a_call_that_was_cut_off_is_left_out() -> None:
    llm = ScriptedLLM(max_context=4096, template=TEMPLATE, text=SPOKEN)
    options = {"num_predict": SPOKEN.index('"Paris"')}
    whole = (await post(llm, stream=False, options=options)).json()
    assert "tool_calls" not in whole["message"] and whole["done_reason"] == "length"
    *pieces, last = lines(await post(llm, options=options))
    assert not any("tool_calls" in piece["message"] for piece in pieces) and last["done_reason"] == "length"
    assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"]


async def test_results_find_their_calls() -> None:
    llm = ScriptedLLM(max_context=4096, template=TEMPLATE)
    calls: list[dict[str, Any]] = [
        {"function": {"name": name, "arguments": {"at": number}}}
        for number, name in enumerate(("time", "weather", "time", "weather"))
    ]
    calls[3]["id"] = "mine"
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_name": "weather", "content": "by its tool"},
        {"role": "tool", "tool_call_id": "mine", "content": "by its id"},
        {"role": "tool", "content": "the first"},
        {"role": "tool", "content": "the last"},
    ]
    assert (await post(llm, messages=messages, stream=False)).status_code == 200
    sent = llm.asked[0][0]
    ids = [call["id"] for call in sent[1]["tool_calls"]]
    assert sent[1]["reasoning_content"] == "Hm." and ids[3] == "mine"
    assert [ids.index(message["tool_call_id"]) for message in sent[2:]] == [1, 3, 0, 2]
    assert [message["name"] for message in sent[2:]] == ["weather", "weather", "time", "time"]
    only_of_the_result = {"role": "tool", "tool_call_id": "c1", "content": "as litellm sends it"}
    for call, status in ((calls[0], 200), (calls[3], 400)):
        asked = [{"role": "assistant", "tool_calls": [call]}, only_of_the_result]
        assert (await post(llm, messages=asked, stream=False)).status_code == status
    again = await post(llm, messages=[*messages, {"role": "tool", "content": "one too many"}])
    assert again.json()["error"] == "messages[6] is a tool result, but no earlier call is waiting for one."
    twice = await post(llm, messages=[{"role": "assistant", "tool_calls": [calls[3], calls[3]]}])
    assert "messages[0].tool_calls[1].id is 'mine', which another call already uses" in twice.json()["error"]


async def test_the_assistant_s_last_message_is_continued(client: httpx.AsyncClient) -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}]
    body = {"messages": begun, "max_tokens": 5, "seed": 3, "continue_final_message": True}
    openai = (await client.post("/v1/chat/completions", json=body)).json()
    found = (await client.post("/api/chat", json={**CHAT, **SHORT, "messages": begun, "stream": False})).json()
    assert found["prompt_eval_count"] == openai["usage"]["prompt_tokens"]
    assert found["message"]["content"] == openai["choices"][0]["message"]["content"]


async def test_a_message_with_calls_is_not_continued() -> None:
    llm = ScriptedLLM(max_context=4096, template=TEMPLATE)
    call = {"function": {"name": "time", "arguments": {}}}
    for calls in ([], [call]):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hm", "tool_calls": calls}]
        assert (await post(llm, messages=messages, stream=False)).status_code == 200
        assert llm.asked[-1][1].continues == (not calls)


async def test_capabilities_tell_of_reasoning() -> None:
    async with client_for(ScriptedLLM(template=TEMPLATE)) as client:
        shown = (await client.post("/api/show", json={"model": "tiny"})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking", "embedding"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_log_probabilities(client: httpx.AsyncClient, path: str) -> None:
    body = {**(CHAT if path == "/api/chat" else {"model": "fake", "prompt": "hi"}), **SHORT, "logprobs": True}
    whole = (await client.post(path, json={**body, "top_logprobs": 2, "stream": False})).json()["logprobs"]
    assert len(whole) == 5 and all(len(each["top_logprobs"]) == 2 for each in whole)
    streamed = [each for line in lines(await client.post(path, json=body)) for each in line.get("logprobs", ())]
    assert [(each["token"], each["logprob"]) for each in streamed] == [
        (each["token"], each["logprob"]) for each in whole
    ]


# -- embeddings --------------------------------------------------------------------------------------------------------


async def test_embeddings_are_those_of_openai_s_api(client: httpx.AsyncClient) -> None:
    texts = ["the cat", "the dog"]
    expected = (await client.post("/v1/embeddings", json={"input": texts})).json()
    found = (await client.post("/api/embed", json={"model": "fake:latest", "input": texts})).json()
    assert found["embeddings"] == [each["embedding"] for each in expected["data"]]
    assert (found["model"], found["prompt_eval_count"]) == ("fake", expected["usage"]["prompt_tokens"])
    one = (await client.post("/api/embed", json={"model": "fake", "input": "the cat", "dimensions": 4})).json()
    assert [len(vector) for vector in one["embeddings"]] == [4]
    old = (await client.post("/api/embeddings", json={"model": "fake", "prompt": "the cat"})).json()
    assert old == {"embedding": found["embeddings"][0]}


async def test_texts_to_embed_are_cut_unless_they_are_not_to_be(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "input": "a" * 5000}
    cut = (await client.post("/api/embed", json=body)).json()
    assert cut["prompt_eval_count"] == 4096
    assert (
        cut["embeddings"] == (await client.post("/api/embed", json={**body, "input": "a" * 4999})).json()["embeddings"]
    )
    refused = await client.post("/api/embed", json={**body, "truncate": False})
    assert refused.status_code == 400 and "maximum context length is 4096 tokens" in refused.json()["error"]


async def test_what_there_may_be_to_embed_is_named(client: httpx.AsyncClient) -> None:
    refused = await client.post("/api/embed", json={"model": "fake", "input": 5})
    assert refused.json() == {"error": "input must be a string or a list of strings, not 5."}


async def test_nothing_to_embed_loads_the_model(client: httpx.AsyncClient) -> None:
    for given in ({}, {"input": ""}, {"input": []}):
        assert (await client.post("/api/embed", json={"model": "fake", **given})).json()["embeddings"] == []
    assert (await client.post("/api/embeddings", json={"model": "fake"})).json() == {"embedding": []}
    loads = (await client.post("/api/chat", json={"model": "fake", "messages": []})).json()
    assert (loads["done_reason"], loads["message"]["content"]) == ("load", "")


async def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    llm = ScriptedLLM(failure=BackendError("it broke"), fail_after=2)
    async with client_for(llm) as client:
        found = lines(await client.post("/api/chat", json={**CHAT, "model": "tiny"}))
    assert found[-1] == {"error": "it broke"}
    assert len(found) == 3
