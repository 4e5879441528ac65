"""litellm, which speaks OpenAI's API and Anthropic's."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from clients_kit import (
    CITY_FORMAT,
    JSON_MESSAGES,
    LIMIT_S,
    MESSAGES,
    MODEL,
    NAMED,
    QUESTION,
    REASONED,
    TOO_LONG,
    TOOL,
    TWO_CALLS,
    City,
    ServedModel,
    Weather,
)

CLIENT = "litellm"
pytestmark = pytest.mark.model
NAME = f"openai/{MODEL}"


def ask(served: ServedModel, **options: Any) -> Any:
    given = {"messages": MESSAGES, "temperature": 0, "max_tokens": 60, **options}
    return litellm.completion(
        **{"model": NAME, "api_base": served.openai, "api_key": served.key, "max_retries": 0, "timeout": LIMIT_S}
        | given
    )


def test_chat(served: ServedModel) -> None:
    """chat"""
    answer = ask(served)
    assert "Paris" in answer.choices[0].message.content and answer.usage.completion_tokens > 0


def test_stream(served: ServedModel) -> None:
    """chat, streamed, with usage at the end"""
    text, usage = "", None
    for chunk in ask(served, stream=True, stream_options={"include_usage": True}):
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        usage = getattr(chunk, "usage", None) or usage
    assert "Paris" in text and usage is not None and usage.completion_tokens > 0


@pytest.mark.parametrize("name", ["hosted_vllm", "text-completion-openai"])
def test_providers(served: ServedModel, name: str) -> None:
    """other ways in: hosted_vllm, text-completion-openai"""
    answer = ask(served, model=f"{name}/{MODEL}", max_tokens=8)
    assert answer.choices[0].message.content is not None and answer.usage.completion_tokens > 0


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tool(served: ServedModel, choice: Any) -> None:
    """tools: required and named"""
    answer = ask(served, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)


def test_tool_streamed(served: ServedModel) -> None:
    """tools, streamed"""
    chunks = list(ask(served, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True))
    whole: Any = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    (call,) = whole.choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)


def test_parallel_tools(served: ServedModel) -> None:
    """tools: several calls in one answer"""
    answer = ask(served, tools=[TOOL], tool_choice="required", max_tokens=400, extra_body=TWO_CALLS)
    assert len(answer.choices[0].message.tool_calls) > 1


def test_tool_result(served: ServedModel) -> None:
    """tool results back"""
    message = ask(served, tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "weather", "content": "18 degrees"}
    answer = ask(served, messages=[*MESSAGES, message, result], tools=[TOOL], tool_choice="none", max_tokens=8)
    assert answer.choices[0].message.content


@pytest.mark.parametrize("form", [CITY_FORMAT, City], ids=["json_schema", "pydantic"])
def test_json_schema(served: ServedModel, form: Any) -> None:
    """structured output: json_schema, and a pydantic model"""
    City.model_validate_json(ask(served, response_format=form).choices[0].message.content)


def test_json_mode(served: ServedModel) -> None:
    """JSON mode"""
    answer = ask(served, messages=JSON_MESSAGES, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_embeddings(served: ServedModel) -> None:
    """embeddings"""
    answer = litellm.embedding(
        model=NAME, input=["a cat", "a dog"], api_base=served.openai, api_key=served.key, encoding_format="float"
    )
    assert len(answer.data) == 2 and len(answer.data[0]["embedding"]) > 100


def test_responses(served: ServedModel) -> None:
    """Responses"""
    request: Any = {
        "model": NAME, "input": QUESTION, "temperature": 0, "max_output_tokens": 16, "api_base": served.openai,
        "api_key": served.key,
    }  # fmt: skip
    answer: Any = litellm.responses(**request)
    assert "Paris" in answer.output_text
    kinds = [event.type for event in litellm.responses(**request, stream=True)]
    assert "response.output_text.delta" in kinds and kinds[-1] in ("response.completed", "response.incomplete")


def anthropic(served: ServedModel, **options: Any) -> Any:
    return ask(served, model=f"anthropic/{MODEL}", api_base=served.url, **options)


def test_anthropic_chat(served: ServedModel) -> None:
    """Anthropic's API: chat and streams"""
    assert "Paris" in anthropic(served).choices[0].message.content
    text = "".join(chunk.choices[0].delta.content or "" for chunk in anthropic(served, stream=True))
    assert "Paris" in text


def test_anthropic_tool(served: ServedModel) -> None:
    """Anthropic's API: tools and their results"""
    message = anthropic(served, tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0].message
    Weather.model_validate_json(message.tool_calls[0].function.arguments)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "weather", "content": "18 degrees"}
    answer = anthropic(served, messages=[*MESSAGES, message, result], tools=[TOOL], tool_choice="none", max_tokens=8)
    assert answer.choices[0].message.content


def test_logprobs(served: ServedModel) -> None:
    """log probabilities"""
    answer = ask(served, logprobs=True, top_logprobs=2, max_tokens=4)
    assert answer.choices[0].logprobs["content"][0]["logprob"] <= 0


def test_reasoning(thinking: ServedModel) -> None:
    """reasoning in a field of its own"""
    message = ask(thinking, extra_body={"grammar": REASONED}).choices[0].message
    assert message.reasoning_content and message.content and "think" not in message.content


def test_errors(served: ServedModel) -> None:
    """errors of the client's own types: ContextWindowExceededError, 401, 404, 429"""
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(served, messages=TOO_LONG)
    with pytest.raises(litellm.AuthenticationError):
        ask(served, api_key="wrong")
    with pytest.raises(litellm.NotFoundError):
        ask(served, model="openai/no-such-model")
    with served.busy(), pytest.raises(litellm.RateLimitError):
        ask(served, api_key=served.limited_key)


def test_anthropic_errors(served: ServedModel) -> None:
    """Anthropic's API: errors of the client's own types"""
    with pytest.raises(litellm.ContextWindowExceededError):
        anthropic(served, messages=TOO_LONG)
    with pytest.raises(litellm.AuthenticationError):
        anthropic(served, api_key="wrong")


async def test_async(served: ServedModel) -> None:
    """async"""
    answer: Any = await litellm.acompletion(
        model=NAME, messages=MESSAGES, api_base=served.openai, api_key=served.key, temperature=0, max_tokens=16
    )
    assert "Paris" in answer.choices[0].message.content
