"""langchain-openai."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from clients_kit import (
    JSON_MESSAGES,
    LIMIT_S,
    MESSAGES,
    MODEL,
    QUESTION,
    TOO_LONG,
    TOOL,
    TWO_CALLS,
    City,
    ServedModel,
    Weather,
)

CLIENT = "langchain-openai"
pytestmark = pytest.mark.model


@tool("weather", args_schema=Weather)
def weather(city: str, unit: str) -> str:
    """The weather now."""
    return f"18 degrees {unit} in {city}"


def chat_model(served: ServedModel, **options: Any) -> ChatOpenAI:
    given: Any = {"temperature": 0, "max_tokens": 60, "max_retries": 0, "timeout": LIMIT_S, **options}
    return ChatOpenAI(model=MODEL, base_url=served.openai, **{"api_key": served.key, **given})


def test_chat(served: ServedModel) -> None:
    """chat"""
    answer = chat_model(served).invoke(QUESTION)
    assert "Paris" in str(answer.content)
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 0


def test_stream(served: ServedModel) -> None:
    """chat, streamed, with usage at the end"""
    text, usage = "", 0
    for chunk in chat_model(served, stream_usage=True).stream(QUESTION):
        text += str(chunk.content)
        usage += chunk.usage_metadata["output_tokens"] if chunk.usage_metadata else 0
    assert "Paris" in text and usage > 0


def test_completion(served: ServedModel) -> None:
    """completions"""
    key: Any = served.key
    model = OpenAI(model=MODEL, base_url=served.openai, api_key=key, temperature=0, max_tokens=8, max_retries=0)
    assert "Paris" in model.invoke("The capital of France is")


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_bind_tools(served: ServedModel, choice: str) -> None:
    """`bind_tools`: required and named"""
    model = chat_model(served).bind_tools([weather], tool_choice=choice, strict=True, parallel_tool_calls=False)
    answer: Any = model.invoke(QUESTION)
    assert [call["name"] for call in answer.tool_calls] == ["weather"] and not answer.invalid_tool_calls
    Weather.model_validate(answer.tool_calls[0]["args"])


def test_tool_streamed(served: ServedModel) -> None:
    """`bind_tools`, streamed"""
    model = chat_model(served).bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    whole: Any = None
    for chunk in model.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert len(whole.tool_calls) == 1
    Weather.model_validate(whole.tool_calls[0]["args"])


def test_parallel_tools(served: ServedModel) -> None:
    """`bind_tools`: several calls in one answer"""
    model = chat_model(served, max_tokens=400, extra_body=TWO_CALLS).bind_tools(
        [weather], tool_choice="required", strict=True
    )
    answer: Any = model.invoke(QUESTION)
    assert len(answer.tool_calls) > 1


def test_tool_result(served: ServedModel) -> None:
    """tool results back"""
    model = chat_model(served)
    required = model.bind_tools([weather], tool_choice="required", strict=True, parallel_tool_calls=False)
    asked = HumanMessage(QUESTION)
    called: Any = required.invoke([asked])
    result = weather.invoke(called.tool_calls[0])
    assert isinstance(result, ToolMessage)
    answer = model.bind_tools([weather], tool_choice="none").invoke([asked, called, result])
    assert answer.content


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output(served: ServedModel, method: Any) -> None:
    """`with_structured_output`: function_calling, json_schema"""
    assert isinstance(chat_model(served).with_structured_output(City, method=method).invoke(QUESTION), City)


def test_json_mode(served: ServedModel) -> None:
    """`with_structured_output`: json_mode"""
    schema = {"title": "Answer", "type": "object"}
    answer = chat_model(served).with_structured_output(schema, method="json_mode").invoke(JSON_MESSAGES)
    assert isinstance(answer, dict)


@pytest.mark.parametrize("counts", [False, True], ids=["texts", "tokens"])
def test_embeddings(served: ServedModel, counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """embeddings, of texts and of tokens"""
    if counts:  # what tiktoken would fetch from the network, which tests do not use
        monkeypatch.setattr("tiktoken.encoding_for_model", lambda _name: _Bytes())
    key: Any = served.key
    model = OpenAIEmbeddings(
        model=MODEL, base_url=served.openai, api_key=key, max_retries=0, check_embedding_ctx_length=counts
    )
    vectors = model.embed_documents(["a cat", "a dog"])
    assert len(vectors) == 2 and len(vectors[0]) == len(vectors[1]) > 100


class _Bytes:
    """An encoding of tiktoken's kind, with a token for each byte."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    encode_ordinary = encode


def test_responses(served: ServedModel) -> None:
    """Responses"""
    answer = chat_model(served, use_responses_api=True).invoke(QUESTION)
    assert "Paris" in answer.text
    parsed = chat_model(served, use_responses_api=True).with_structured_output(City, method="json_schema")
    assert isinstance(parsed.invoke(QUESTION), City)


def test_logprobs(served: ServedModel) -> None:
    """log probabilities"""
    answer = chat_model(served, max_tokens=4).bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert answer.response_metadata["logprobs"]["content"][0]["logprob"] <= 0


def test_errors(served: ServedModel) -> None:
    """errors: those of openai, and ContextOverflowError"""
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError):
        chat_model(served).invoke(TOO_LONG)
    with pytest.raises(openai.AuthenticationError):
        chat_model(served, api_key="wrong").invoke(MESSAGES)
    with served.busy(), pytest.raises(openai.RateLimitError):
        chat_model(served, api_key=served.limited_key).invoke(MESSAGES)


async def test_async(served: ServedModel) -> None:
    """async"""
    model = chat_model(served)
    assert "Paris" in str((await model.ainvoke(QUESTION)).content)
    assert "Paris" in "".join([str(chunk.content) async for chunk in model.astream(QUESTION)])
