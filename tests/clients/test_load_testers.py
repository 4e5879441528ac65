"""Tools that measure servers and models, by the requests that they send: lm-eval, GuideLLM and aiperf are too large to
be installed for these tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clients_kit import MODEL, QUESTION, TOOL, ServedModel

CLIENT = "lm-eval, GuideLLM, aiperf"
pytestmark = pytest.mark.model
USAGE = {"include_usage": True}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


def events(served: ServedModel, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = served.post(path, body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_lm_eval_scores(served: ServedModel) -> None:
    """lm-eval, `local-completions`: log likelihoods of token ids"""
    prompts = [[504, 3575, 282, 4649, 314, 7042], [504, 3575, 282, 4649, 314, 260]]
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
            "echo": True}  # fmt: skip
    answer = served.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    for prompt, choice in zip(prompts, sorted(answer.json()["choices"], key=lambda one: one["index"]), strict=True):
        logprobs = choice["logprobs"]
        scored = logprobs["token_logprobs"][1:-1]  # lm-eval leaves out the one token that was generated
        assert len(scored) == len(prompt) - 1 and all(value <= 0 for value in scored)
        best = [max(top.values()) for top in logprobs["top_logprobs"][1:-1]]
        assert all(value <= top for value, top in zip(scored, best, strict=True))


def test_lm_eval_generates(served: ServedModel) -> None:
    """lm-eval, `local-completions` and `local-chat-completions`: texts until a stop string"""
    until = ["\n\n", "Question:"]
    body = {"prompt": ["Question: 1 + 1?\nAnswer:"], "model": MODEL, "max_tokens": 8, "temperature": 0, "stop": until,
            "seed": 1234}  # fmt: skip
    answer = served.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert all(stop not in answer.json()["choices"][0]["text"] for stop in until)
    chat = {**body, "messages": [{"role": "user", "content": QUESTION, "type": "text"}]}
    del chat["prompt"]
    answer = served.post("/v1/chat/completions", chat)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]


def test_guidellm_completions(served: ServedModel) -> None:
    """GuideLLM: completions of a fixed length, usage in every event"""
    body = {"model": MODEL, "prompt": QUESTION, "stream": True, "stream_options": CONTINUOUS, "max_tokens": 12,
            "stop": None, "ignore_eos": True}  # fmt: skip
    found = events(served, "/v1/completions", body)
    assert all(event["usage"] for event in found)
    assert found[-1]["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
def test_guidellm_chat(served: ServedModel, stream: bool) -> None:
    """GuideLLM: chats of a fixed length, whole and streamed"""
    content = [{"type": "text", "text": QUESTION}]
    body: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}],
        "max_completion_tokens": 12, "stop": None, "ignore_eos": True,
    }  # fmt: skip
    if stream:
        body |= {"stream": True, "stream_options": CONTINUOUS}
        assert events(served, "/v1/chat/completions", body)[-1]["usage"]["completion_tokens"] == 12
        return
    answer = served.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 12


def test_guidellm_tools(served: ServedModel) -> None:
    """GuideLLM: a turn that must call a tool, and the one after it"""
    asked = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
    stream = {"model": MODEL, "stream": True, "stream_options": CONTINUOUS, "tools": [TOOL]}
    body = {**stream, "messages": [asked], "tool_choice": "required", "parallel_tool_calls": False}
    calls: dict[int, dict[str, Any]] = {}
    for event in events(served, "/v1/chat/completions", body):
        for choice in event["choices"]:
            for delta in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(delta["index"], {"id": "", "type": "function", "name": "", "arguments": ""})
                call["id"] = delta.get("id") or call["id"]
                for name in ("name", "arguments"):
                    call[name] += delta["function"].get(name) or ""
    sent = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in calls.values()
    ]
    called = {"role": "assistant", "content": None, "tool_calls": sent}
    result = {"role": "tool", "tool_call_id": sent[0]["id"], "content": '{"status": "ok"}'}
    body = {**stream, "messages": [asked, called, result], "tool_choice": "none", "max_completion_tokens": 8}
    assert events(served, "/v1/chat/completions", body)[-1]["usage"]["completion_tokens"] > 0


def test_guidellm_embeddings(served: ServedModel) -> None:
    """GuideLLM and aiperf: embeddings"""
    answer = served.post("/v1/embeddings", {"model": MODEL, "input": [QUESTION], "encoding_format": "float"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] > 0


def test_aiperf_chat(served: ServedModel) -> None:
    """aiperf: chats, streamed, with usage"""
    body = {"messages": [{"role": "user", "content": QUESTION}], "model": MODEL, "stream": True,
            "max_completion_tokens": 12, "min_tokens": 12, "ignore_eos": True, "stream_options": USAGE}  # fmt: skip
    assert events(served, "/v1/chat/completions", body)[-1]["usage"]["completion_tokens"] == 12


def test_aiperf_completions(served: ServedModel) -> None:
    """aiperf: completions, streamed, with usage"""
    body = {"prompt": [QUESTION], "model": MODEL, "stream": True, "max_tokens": 12, "ignore_eos": True,
            "stream_options": USAGE}  # fmt: skip
    assert events(served, "/v1/completions", body)[-1]["usage"]["completion_tokens"] == 12
