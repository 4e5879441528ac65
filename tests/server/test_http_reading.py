"""EmbeddingJob and log probabilities of prompts over HTTP, on the fake backend under the whole engine."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from cllm.config import load_config
from cllm.llm import AsyncLLM
from cllm.server.app import create_app
from cllm.server.openai.embeddings_schema import EmbeddingReply, EmbeddingRequest, RerankRequest
from cllm.server.openai.replies import ChatReply, CompletionReply
from cllm.text.tokenizer import ByteTokenizer
from engine_kit import read_alone

PROMPT = "a prompt that is scored"
TEXT_OF = ByteTokenizer(320).token_text


USER = {"role": "user", "content": PROMPT}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    config = load_config(overrides={"backend.type": "fake", "scheduler.max_step_tokens": 8}).config
    async with AsyncLLM(config) as llm:
        transport = httpx.ASGITransport(create_app(llm, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as opened:
            yield opened


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int = 200) -> Any:
    reply = await client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def alone(text: str = PROMPT) -> list[Any]:
    return read_alone(list(text.encode()), "scores")


# -- log probabilities ---------------------------------------------------------------------------------------------


async def test_an_echo_has_the_log_probabilities_of_the_prompt_and_of_the_answer(client: httpx.AsyncClient) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    reply = await post(client, "/v1/completions", body)
    assert CompletionReply.model_validate(reply).model_dump(exclude_unset=True) == reply
    (choice,) = reply["choices"]
    found, scores = choice["logprobs"], alone()
    size = len(PROMPT)
    assert choice["text"].startswith(PROMPT) and len(choice["text"]) == size + 3
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:size] == scores[0] and len(found["token_logprobs"]) == size + 3
    assert "".join(found["tokens"]) == choice["text"] and found["text_offset"] == list(range(size + 3))
    for place in range(1, size):
        top = dict(zip(map(TEXT_OF, scores[2][place - 1]), scores[3][place - 1], strict=True))
        assert found["top_logprobs"][place] == top | {PROMPT[place]: scores[0][place - 1]}
    plain = await post(client, "/v1/completions", {**body, "echo": False})
    tail = {name: values[size:] for name, values in found.items()}
    tail["text_offset"] = [offset - size for offset in tail["text_offset"]]
    assert plain["choices"][0]["logprobs"] == tail
    assert plain["usage"] | {"prompt_tokens_details": None} == reply["usage"] | {"prompt_tokens_details": None}


async def test_offsets_count_characters_however_many_tokens_they_have(client: httpx.AsyncClient) -> None:
    body = {"prompt": "aé日b", "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = (await post(client, "/v1/completions", body))["choices"]
    assert choice["text"] == "aé日b" and choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("n", [1, 3])
async def test_with_no_tokens_to_generate_there_is_the_prompt_alone(client: httpx.AsyncClient, n: int) -> None:
    body = {"prompt": [PROMPT, "x"], "echo": True, "logprobs": 0, "max_tokens": 0, "n": n}
    reply = await post(client, "/v1/completions", body)
    assert [choice["text"] for choice in reply["choices"]] == [PROMPT] * n + ["x"] * n
    for choice in reply["choices"][:n]:
        assert choice["logprobs"]["token_logprobs"] == [None, *alone()[0]] and choice["finish_reason"] == "length"
    assert reply["choices"][-1]["logprobs"]["token_logprobs"] == [None]
    assert reply["usage"]["completion_tokens"] == 0
    nothing = await post(client, "/v1/completions", {"prompt": PROMPT, "max_tokens": 0})
    assert nothing["choices"][0] | {"stop_reason": None} == {
        "index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip


async def test_vllms_form_in_completions_and_in_chats(client: httpx.AsyncClient) -> None:
    body = {"prompt": PROMPT, "prompt_logprobs": 1, "max_tokens": 1, "echo": True, "logprobs": 2}
    reply = await post(client, "/v1/completions", body)
    assert CompletionReply.model_validate(reply).model_dump(exclude_unset=True) == reply
    (choice,), scores = reply["choices"], alone()
    told = choice["prompt_logprobs"]
    assert told[0] is None and len(told) == len(PROMPT)
    for place, entry in enumerate(told[1:]):
        token, best = ord(PROMPT[place + 1]), scores[2][place][0]
        assert entry[str(token)] == {
            "logprob": scores[0][place], "rank": scores[1][place], "decoded_token": PROMPT[place + 1],
        }  # fmt: skip
        assert entry[str(best)]["rank"] == 1 and len(entry) == (1 if token == best else 2)
    assert len(choice["logprobs"]["top_logprobs"][1]) in (2, 3)
    message = {"messages": [{"role": "user", "content": "hello"}], "prompt_logprobs": 0, "max_tokens": 2}
    chat = await post(client, "/v1/chat/completions", message)
    assert ChatReply.model_validate(chat).model_dump(exclude_unset=True) == chat
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and chat["prompt_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])
    streamed = await events(client, "/v1/chat/completions", {**message, "n": 2})
    assert streamed[0]["prompt_logprobs"] == chat["prompt_logprobs"]
    assert not any("prompt_logprobs" in event for event in streamed[1:])


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    reply = await client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_scored_stream_tells_its_progress_and_usage_too(client: httpx.AsyncClient, path: str) -> None:
    given: dict[str, Any] = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [USER]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**given, "max_tokens": 3, "prompt_logprobs": 1, "return_progress": True, "stream_options": options}
    told = await events(client, path, asked)
    progress = [event["prompt_progress"] for event in told if "prompt_progress" in event]
    assert progress and progress[-1]["processed"] == progress[-1]["total"]
    answer = [event for event in told if event["choices"] and "prompt_progress" not in event]
    assert all(event["usage"]["prompt_tokens"] == progress[-1]["total"] for event in answer)
    assert sum("prompt_logprobs" in json.dumps(event) for event in told) == 1


async def test_a_streams_first_event_tells_of_the_prompt(client: httpx.AsyncClient) -> None:
    body = {
        "prompt": PROMPT * 30, "echo": True, "logprobs": 3, "prompt_logprobs": 2, "max_tokens": 4, "temperature": 0,
        "ignore_eos": True, "n": 2,
    }  # fmt: skip
    whole = await post(client, "/v1/completions", body)
    streamed = await events(client, "/v1/completions", body)
    for index in range(2):
        parts = [event["choices"][0] for event in streamed if event["choices"][0]["index"] == index]
        choice = whole["choices"][index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for part in parts for value in part["logprobs"][name]]
            assert joined == choice["logprobs"][name]
        assert parts[0]["prompt_logprobs"] == choice["prompt_logprobs"]
        assert not any("prompt_logprobs" in part for part in parts[1:])
        assert parts[-1]["finish_reason"] == "length"


async def test_the_token_that_ends_an_answer_has_its_place_behind_a_scored_prompt(client: httpx.AsyncClient) -> None:
    """lm-eval takes the last one off, whatever it is."""
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    best = await post(client, "/v1/completions", body)
    end = ord(best["choices"][0]["text"])
    stopped = {**body, "stop_token_ids": [end], "echo": True}
    reply = await post(client, "/v1/completions", stopped)
    assert reply["choices"][0]["text"] == PROMPT and reply["choices"][0]["finish_reason"] == "stop"
    assert len(reply["choices"][0]["logprobs"]["token_logprobs"]) == len(PROMPT) + 1


async def test_too_many_are_refused_by_name(client: httpx.AsyncClient) -> None:
    prompts = {"prompt": ["x" * 4000] * 100, "max_tokens": 1}
    for asks, name in (({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "logprobs")):
        problem = (await post(client, "/v1/completions", {**prompts, **asks}, 400))["error"]
        assert problem["param"] == name and "max_logprobs" in problem["message"]
    window = {"prompt": PROMPT, "prompt_logprobs": 1, "context_window": {"recent": 64}}
    assert (await post(client, "/v1/completions", window, 400))["error"]["param"] == "prompt_logprobs"


# -- embeddings ----------------------------------------------------------------------------------------------------


async def test_many_texts_are_one_line_in_the_log(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "cllm"):
        await post(client, "/v1/embeddings", {"input": ["the cat"] * 50})
    (line,) = [each.getMessage() for each in caplog.records if "embd-" in each.getMessage()]
    assert "embedded 50 of 50 texts: prompts 350 (" in line


async def test_embeddings_in_both_forms(client: httpx.AsyncClient) -> None:
    texts = ["the cat", "a dog", "the cat"]
    reply = await post(client, "/v1/embeddings", {"input": texts, "user": "me", "model": "fake"})
    assert EmbeddingReply.model_validate(reply).model_dump() == reply
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2] and reply["model"] == "fake"
    assert reply["usage"] == {"prompt_tokens": 19, "total_tokens": 19}
    vectors = [np.float32(entry["embedding"]) for entry in reply["data"]]
    for text, vector in zip(texts, vectors, strict=True):
        assert vector.tolist() == read_alone(list(text.encode()), "last")
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)
    ids = [list(text.encode()) for text in texts]
    coded = await post(client, "/v1/embeddings", {"input": ids, "encoding_format": "base64"})
    for vector, entry in zip(vectors, coded["data"], strict=True):
        assert np.array_equal(np.frombuffer(base64.b64decode(entry["embedding"]), "<f4"), vector)
    for given in ("the cat", ids[0]):
        single = await post(client, "/v1/embeddings", {"input": given, "dimensions": 3})
        (short,) = [np.float32(entry["embedding"]) for entry in single["data"]]
        assert short == pytest.approx(vectors[0][:3] / np.linalg.norm(vectors[0][:3]), abs=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "input is empty"),
        ({"input": ["x", ""]}, "input", "input[1] is empty"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": [[5], [400]]}, "input", "input[1] contains token 400"),
        ({"input": [-1]}, "input", ""),
        ({"input": ["x", -5]}, "input[1]", "greater than or equal to 0"),
        ({"input": ["x", [5, None]]}, "input[1][1]", ""),
        ({"input": ["x", 400]}, "input", "input[0] contains token 400"),
        ({"input": "x", "messages": [USER]}, "messages", "together with input"),
        ({"input": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "together with messages"),
        ({"input": {"text": "x"}}, "input", ""),
        ({"input": "x" * 5000}, "input", "5000 tokens"),
        ({"input": ["x"] * 10_000}, "input", "10000 texts; at most 2048"),
        ({"input": [[5]] * 10_000}, "input", "10000 texts; at most 2048"),
        ({"input": "x", "dimensions": 9}, "dimensions", "have 8"),
        ({"input": "x", "dimensions": 0}, "dimensions", ""),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": "x", "nonsense": 1}, "nonsense", "not a parameter"),
    ],
)
async def test_what_is_no_input_is_refused_by_name(
    client: httpx.AsyncClient, body: dict[str, Any], param: str, words: str
) -> None:
    problem = (await post(client, "/v1/embeddings", body, 400))["error"]
    assert problem["param"] == param and words in problem["message"]


async def test_a_text_in_parts_is_the_text_of_its_parts(client: httpx.AsyncClient) -> None:
    whole = await post(client, "/v1/embeddings", {"input": ["abcd", "xy"]})
    parts: list[Any] = [["ab", *b"c", "d"], "xy"]
    assert await post(client, "/v1/embeddings", {"input": parts}) == whole
    one = await post(client, "/v1/embeddings", {"input": [*b"ab", "cd"]})
    assert one["data"] == whole["data"][:1] and one["usage"]["prompt_tokens"] == 4
    mixed = await post(client, "/v1/embeddings", {"input": ["abcd", [*b"xy"]]})
    assert mixed == whole


async def test_a_chat_is_embedded_as_its_prompt(client: httpx.AsyncClient) -> None:
    for how in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
        tokens = (await post(client, "/tokenize", {"messages": [USER], **how}))["tokens"]
        reply = await post(client, "/v1/embeddings", {"messages": [USER], **how})
        assert reply["data"] == (await post(client, "/v1/embeddings", {"input": tokens}))["data"]
        assert reply["usage"]["prompt_tokens"] == len(tokens)
    assert (await post(client, "/v1/embeddings", {"messages": [USER]}))["data"] == reply["data"]
    long = {"messages": [{"role": "user", "content": "x" * 9000}]}
    assert (await post(client, "/v1/embeddings", long, 400))["error"]["param"] == "messages"
    cut = await post(client, "/v1/embeddings", {**long, "truncate_prompt_tokens": 5})
    assert cut["usage"]["prompt_tokens"] == 5
    whole = await post(client, "/v1/embeddings", {**long, "truncate_prompt_tokens": -1})
    assert whole["usage"]["prompt_tokens"] == 4096


@pytest.mark.parametrize(("side", "left"), [(None, "0123"), ("right", "0123"), ("left", "6789")])
@pytest.mark.parametrize("given", ["0123456789", [*b"0123456789"], [*b"01234", "56789"]])
async def test_texts_are_cut_on_either_side(client: httpx.AsyncClient, given: Any, side: str | None, left: str) -> None:
    how = {"truncate_prompt_tokens": 4, "truncation_side": side}
    reply = await post(client, "/v1/embeddings", {"input": given, **how})
    assert reply == await post(client, "/v1/embeddings", {"input": left})
    problem = await post(client, "/v1/embeddings", {"input": given, "truncate_prompt_tokens": 4097}, 400)
    assert problem["error"]["param"] == "truncate_prompt_tokens"


async def test_many_inputs_beside_a_stream(client: httpx.AsyncClient) -> None:
    """All of both come, and the stream is the same as without."""
    talk = {"prompt": "tell", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    before = await events(client, "/v1/completions", talk)
    texts = [f"text {number}" for number in range(2048)]
    streamed, embedded = await asyncio.gather(
        events(client, "/v1/completions", talk), post(client, "/v1/embeddings", {"input": texts, "dimensions": 1})
    )
    shown = ["".join(event["choices"][0]["text"] for event in found) for found in (before, streamed)]
    assert shown[0] == shown[1] and len(embedded["data"]) == 2048


async def test_a_model_without_a_head_for_it_ranks_nothing(client: httpx.AsyncClient) -> None:
    problem = await post(client, "/v1/rerank", {"query": "x", "documents": ["y"]}, 400)
    assert problem["error"]["param"] == "model" and "cannot rank documents" in problem["error"]["message"]


@pytest.mark.parametrize("model", [EmbeddingRequest, RerankRequest])
def test_documented_examples_are_valid(model: Any) -> None:
    model.model_validate(model.model_json_schema()["example"])
