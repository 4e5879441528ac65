"""Details of answers that clients count on: what an empty one has, when usage is told, ids of tokens, cut prompts."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cllm.config import Config
from cllm.server.openai.replies import ChatReply, CompletionReply
from cllm.text.tokenizer import ByteTokenizer
from http_kit import client_for
from scripted_llm import ScriptedLLM

EOS = ByteTokenizer.EOS_ID
USER = {"role": "user", "content": "hi"}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 20},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 20},
}
TEMPLATE_WITH_REASONING = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
    "{# <think> and </think> #}{% if add_generation_prompt %}a{% endif %}"
)


async def post(llm: ScriptedLLM, path: str, body: dict[str, Any], status: int = 200) -> Any:
    async with client_for(llm) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def stream(llm: ScriptedLLM, path: str, body: dict[str, Any]) -> list[Any]:
    async with client_for(llm) as client:
        reply = await client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    return events(reply)


def events(reply: httpx.Response) -> list[Any]:
    lines = [line for line in reply.text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(choice: dict[str, Any]) -> str:
    """Of an event."""
    return str(choice.get("text", "") or choice.get("delta", {}).get("content", "") or "")


# -- log probabilities of an empty answer ---------------------------------------------------------------------------


async def test_an_empty_completion_has_the_log_probability_of_its_end() -> None:
    body = {"prompt": "hi", "logprobs": 1}
    (choice,) = (await post(ScriptedLLM(text=""), "/v1/completions", body))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["logprobs"]["tokens"] == ["<eos>"] and choice["logprobs"]["text_offset"] == [0]
    assert choice["logprobs"]["token_logprobs"][0] == choice["logprobs"]["top_logprobs"][0]["<eos>"] <= 0
    streamed = [event["choices"][0] for event in await stream(ScriptedLLM(text=""), "/v1/completions", body)]
    assert [each["logprobs"] for each in streamed if each["logprobs"]] == [choice["logprobs"]]
    whole = (await post(ScriptedLLM(text="a"), "/v1/completions", body))["choices"][0]
    assert whole["logprobs"]["tokens"] == ["a"]


async def test_an_empty_chat_answer_has_the_log_probability_of_its_end() -> None:
    body = {"messages": [USER], "logprobs": True}
    (choice,) = (await post(ScriptedLLM(text=""), "/v1/chat/completions", body))["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["<eos>"]
    streamed = await stream(ScriptedLLM(text=""), "/v1/chat/completions", body)
    told = [event["choices"][0]["logprobs"] for event in streamed if event["choices"][0]["logprobs"]]
    assert told == [choice["logprobs"]]


async def test_an_answer_without_any_token_has_an_object_without_entries() -> None:
    nothing = {"max_tokens": 0}
    (choice,) = (await post(ScriptedLLM(), "/v1/completions", {"prompt": "hi", "logprobs": 0, **nothing}))["choices"]
    assert choice["logprobs"] == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    body = {"messages": [USER], "logprobs": True, **nothing}
    (choice,) = (await post(ScriptedLLM(), "/v1/chat/completions", body))["choices"]
    assert choice["logprobs"] == {"content": [], "refusal": None}


# -- usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_usage_in_an_event_counts_the_tokens_up_to_its_text(path: str, drafts: bool) -> None:
    """They all come at once, so that the count of all is known before the first event is written."""
    text = "again and again and again and again"
    llm = ScriptedLLM(Config.model_validate({"drafts": {"enabled": drafts}}), text=text, max_context=400)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**PATHS[path], "max_tokens": 300, "temperature": 0, "stream_options": options}
    told = await stream(llm, path, body)
    assert told[-1]["choices"] == [] and told[-1]["usage"]["completion_tokens"] == len(text) + 1
    said = ""
    for event in told[:-1]:
        said += text_of(event["choices"][0])
        ended = event["choices"][0]["finish_reason"] is not None
        assert event["usage"]["completion_tokens"] == len(said) + ended
    assert said == text


async def test_usage_counts_reasoning_and_calls_up_to_their_text() -> None:
    call = '<think>well</think>ok {"name": "f", "arguments": {"a": 1}}'
    llm = ScriptedLLM(text=call, template=TEMPLATE_WITH_REASONING, max_context=900)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [USER], "tools": [tool], "max_tokens": 300, "temperature": 0, "stream_options": options}
    told = await stream(llm, "/v1/chat/completions", body)
    counts = [event["usage"]["completion_tokens"] for event in told]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == len(call) + 1
    thought = [event for event in told[:-1] if event["choices"][0]["delta"].get("reasoning_content")]
    assert thought and thought[0]["usage"]["completion_tokens"] < len("<think>well</think>")


@pytest.mark.parametrize("include", [False, None])
@pytest.mark.parametrize("path", PATHS)
async def test_there_is_no_usage_without_include_usage(path: str, include: bool | None) -> None:
    options = {"include_usage": include, "continuous_usage_stats": True}
    told = await stream(ScriptedLLM(), path, {**PATHS[path], "stream_options": options})
    assert told and not any("usage" in event for event in told)


# -- ids of tokens --------------------------------------------------------------------------------------------------


async def test_ids_of_the_prompt_and_of_all_tokens_of_completions() -> None:
    body = {"prompt": ["hi", "abc"], "return_token_ids": True}
    reply = await post(ScriptedLLM(text="yes"), "/v1/completions", body)
    CompletionReply.model_validate(reply)
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [list(b"hi"), list(b"abc")]
    assert [choice["token_ids"] for choice in reply["choices"]] == [[*b"yes", EOS]] * 2
    told = await stream(ScriptedLLM(text="yes"), "/v1/completions", body)
    for index, prompt in enumerate((b"hi", b"abc")):
        own = [event["choices"][0] for event in told if event["choices"][0]["index"] == index]
        assert own[0]["prompt_token_ids"] == [*prompt]
        assert not any("prompt_token_ids" in choice for choice in own[1:])
        assert [token for choice in own for token in choice["token_ids"]] == [*b"yes", EOS]
    assert "token_ids" not in json.dumps(await post(ScriptedLLM(), "/v1/completions", {"prompt": "hi"}))


@pytest.mark.parametrize("tools", [False, True])
async def test_ids_of_the_prompt_and_of_all_tokens_of_a_chat(tools: bool) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": [USER], "return_token_ids": True, **({"tools": [tool]} if tools else {})}
    llm = ScriptedLLM(text="yes", max_context=900)
    reply = await post(llm, "/v1/chat/completions", body)
    ChatReply.model_validate(reply)
    assert reply["prompt_token_ids"] == [*llm.generations[0].prompt_ids]
    assert reply["choices"][0]["token_ids"] == [*b"yes", EOS]
    told = await stream(ScriptedLLM(text="yes", max_context=900), "/v1/chat/completions", body)
    assert told[0]["prompt_token_ids"] == reply["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in told[1:])
    assert [token for event in told for token in event["choices"][0]["token_ids"]] == [*b"yes", EOS]


async def test_log_probabilities_name_tokens_by_their_ids() -> None:
    body = {"prompt": "hi", "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
    (choice,) = (await post(ScriptedLLM(text="yé"), "/v1/completions", body))["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in [*"hiyé".encode(), EOS]]
    tokens, told = choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"]
    assert [next(iter(entry)) for entry in told[1:]] == tokens[1:]
    assert choice["logprobs"]["text_offset"][:5] == [0, 1, 2, 3, 3]
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = (await post(ScriptedLLM(text="y"), "/v1/chat/completions", body))["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == (f"token_id:{ord('y')}", [ord("y")])
    assert entry["top_logprobs"][0]["token"] == f"token_id:{ord('y')}"


# -- cut prompts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({"truncate_prompt_tokens": 3}, "789"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "012"),
        ({"truncate_prompt_tokens": 40}, "0123456789"),
        ({"truncation_side": "right"}, "0123456789"),
    ],
)
@pytest.mark.parametrize("prompt", ["0123456789", [*b"0123456789"]])
async def test_a_prompt_is_cut_on_either_side(prompt: Any, how: dict[str, Any], left: str) -> None:
    reply = await post(ScriptedLLM(text="."), "/v1/completions", {"prompt": prompt, "echo": True, **how})
    assert reply["choices"][0]["text"] == f"{left}."
    assert reply["usage"]["prompt_tokens"] == len(left)


async def test_a_long_prompt_is_cut_to_what_leaves_room_for_the_answer() -> None:
    body = {"prompt": "x" * 200, "max_tokens": 20, "truncate_prompt_tokens": -1}
    assert (await post(ScriptedLLM(), "/v1/completions", body))["usage"]["prompt_tokens"] == 65 - 20
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 200}], "truncate_prompt_tokens": -1}
    assert (await post(ScriptedLLM(), "/v1/chat/completions", chat))["usage"]["prompt_tokens"] == 64
    chat |= {"truncate_prompt_tokens": 7}
    assert (await post(ScriptedLLM(), "/v1/chat/completions", chat))["usage"]["prompt_tokens"] == 7


@pytest.mark.parametrize("most", [65, 0, -2])
@pytest.mark.parametrize("path", PATHS)
async def test_a_prompt_cannot_be_cut_to_more_than_fits(path: str, most: int) -> None:
    reply = await post(ScriptedLLM(), path, {**PATHS[path], "truncate_prompt_tokens": most}, 400)
    assert reply["error"]["param"] == "truncate_prompt_tokens"


# -- echo of chats --------------------------------------------------------------------------------------------------


async def test_the_message_that_is_continued_comes_before_its_continuation() -> None:
    said = {"role": "assistant", "content": "The sky is"}
    body = {"messages": [USER, said], "continue_final_message": True, "add_generation_prompt": False, "echo": True}
    reply = await post(ScriptedLLM(text=" blue"), "/v1/chat/completions", body)
    assert reply["choices"][0]["message"]["content"] == "The sky is blue"
    told = await stream(ScriptedLLM(text=" blue"), "/v1/chat/completions", {**body, "n": 2})
    for index in (0, 1):
        own = [event["choices"][0] for event in told if event["choices"][0]["index"] == index]
        assert "".join(map(text_of, own)) == "The sky is blue"
        assert [choice["delta"]["role"] for choice in own if "role" in choice["delta"]] == ["assistant"]
    plain = await post(ScriptedLLM(text=" blue"), "/v1/chat/completions", {**body, "echo": False})
    assert plain["choices"][0]["message"]["content"] == " blue"
    of_user = await post(ScriptedLLM(text="yes"), "/v1/chat/completions", {"messages": [USER], "echo": True})
    assert of_user["choices"][0]["message"]["content"] == "yes"


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("size", [300, 1_000_000])
async def test_a_prompt_that_is_too_long_is_told_in_numbers_too(path: str, size: int) -> None:
    long = "x" * size
    body = {"prompt": long} if "chat" not in path else {"messages": [{"role": "user", "content": long}]}
    error = (await post(ScriptedLLM(), path, body if "resp" not in path else {"input": long}, 400))["error"]
    assert error["code"] == "context_length_exceeded" and error["n_ctx"] == 65
    if path == "/v1/completions" and size == 300:
        assert error["n_prompt_tokens"] == 300
    assert 65 < error["n_prompt_tokens"] <= size + 100


async def test_other_errors_have_no_numbers() -> None:
    error = (await post(ScriptedLLM(), "/v1/completions", {"prompt": ""}, 400))["error"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("biases", "named"),
    [
        ({"bad1": 50, "7": 1, "bad2": 20}, "'bad1', 'bad2'"),
        ({"1": "x", "2": None, "3": 1}, "tokens 1, 2"),
        ({"998": 1, "7": 1, "999": 1}, "998, 999"),
    ],
)
async def test_all_wrong_keys_of_logit_bias_are_named(biases: dict[str, Any], named: str) -> None:
    error = (await post(ScriptedLLM(), "/v1/completions", {"prompt": "hi", "logit_bias": biases}, 400))["error"]
    assert error["param"] == "logit_bias" and named in error["message"]


async def test_of_very_many_wrong_keys_the_first_are_named() -> None:
    biases = {f"bad{number}": 1 for number in range(1000)}
    error = (await post(ScriptedLLM(), "/v1/completions", {"prompt": "hi", "logit_bias": biases}, 400))["error"]
    assert "'bad31' and 968 more" in error["message"] and "bad32" not in error["message"]


# -- other names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completions", {"prompt": "hi"}),
        ("/chat/completions", {"messages": [USER]}),
        ("/responses", {"input": "hi"}),
        ("/embeddings", {"input": "hi"}),
        ("/chat/completions/input_tokens", {"messages": [USER]}),
        ("/responses/input_tokens", {"input": "hi"}),
    ],
)
async def test_llama_servers_paths_without_v1(path: str, body: dict[str, Any]) -> None:
    llm = ScriptedLLM()
    short, whole = await post(llm, path, body), await post(llm, f"/v1{path}", body)
    assert set(short) == set(whole) and short.get("object") == whole.get("object")


async def test_more_of_llama_servers_paths() -> None:
    async with client_for(ScriptedLLM()) as client:
        assert (await client.get("/models")).json() == (await client.get("/v1/models")).json()
        assert (await client.get("/v1/health")).json() == (await client.get("/health")).json()
        for path in ("/rerank", "/reranking", "/v1/reranking", "/v1/rerank"):
            refused = await client.post(path, json={"query": "a", "documents": ["b"]})
            assert (refused.status_code, "cannot rank" in refused.text) == (400, True)
        assert (await client.get("/chat/completions")).status_code == 404


async def test_the_tokens_of_a_chat_are_counted() -> None:
    llm = ScriptedLLM()
    counted = await post(llm, "/v1/chat/completions/input_tokens", {"messages": [USER]})
    answered = await post(llm, "/v1/chat/completions", {"messages": [USER], "max_tokens": 1})
    assert counted["input_tokens"] == answered["usage"]["prompt_tokens"]
