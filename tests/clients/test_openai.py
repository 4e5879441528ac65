"""openai for Python."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
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
from server_process import until

CLIENT = "openai (Python)"
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def client(served: ServedModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.openai, api_key=served.key, max_retries=0, timeout=LIMIT_S) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    """chat"""
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None and answer.usage.total_tokens > answer.usage.prompt_tokens > 10


def test_stream(client: openai.OpenAI) -> None:
    """chat, streamed, with usage at the end"""
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16)
    texts, usage = [], None
    for event in client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    ):
        texts += [choice.delta.content or "" for choice in event.choices]
        usage = event.usage or usage
    assert "".join(texts) == whole.choices[0].message.content
    assert usage is not None and usage.completion_tokens == (whole.usage and whole.usage.completion_tokens)


def test_completion(client: openai.OpenAI) -> None:
    """completions"""
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8)
    assert "Paris" in answer.choices[0].text


def test_models(client: openai.OpenAI) -> None:
    """list of models"""
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def calls_of(answer: Any) -> list[Weather]:
    calls = answer.choices[0].message.tool_calls
    assert len({call.id for call in calls}) == len(calls)
    return [Weather.model_validate_json(call.function.arguments) for call in calls]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tool(client: openai.OpenAI, choice: Any) -> None:
    """tools: required and named"""
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=60
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert len(calls_of(answer)) == 1


def test_tool_auto(client: openai.OpenAI) -> None:
    """tools: left to the model"""
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL], temperature=0, max_tokens=24)
    message = answer.choices[0].message
    assert message.content or message.tool_calls


def test_tool_streamed(client: openai.OpenAI) -> None:
    """tools, streamed"""
    name, arguments = "", ""
    for event in client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", parallel_tool_calls=False,
        max_tokens=60, stream=True,
    ):  # fmt: skip
        for call in event.choices[0].delta.tool_calls or ():
            assert call.index == 0 and call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "weather"
    Weather.model_validate_json(arguments)


def test_parallel_tools(client: openai.OpenAI) -> None:
    """tools: several calls in one answer"""
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=400,
        extra_body=TWO_CALLS,
    )  # fmt: skip
    assert len(calls_of(answer)) > 1


def test_tool_result(client: openai.OpenAI) -> None:
    """tool results back"""
    first = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=60
    )
    message = first.choices[0].message
    assert message.tool_calls
    history = [
        *MESSAGES,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 degrees"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL], max_tokens=8)
    assert second.usage is not None and first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_json_schema(client: openai.OpenAI) -> None:
    """structured output: json_schema"""
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=CITY_FORMAT, max_tokens=60)
    City.model_validate_json(answer.choices[0].message.content or "")


def test_parse(client: openai.OpenAI) -> None:
    """structured output: `parse` with a pydantic model"""
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City, max_tokens=60)
    assert isinstance(answer.choices[0].message.parsed, City)


def test_parse_tool(client: openai.OpenAI) -> None:
    """structured output: `parse` of a strict tool's arguments"""
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, tools=[openai.pydantic_function_tool(Weather)], tool_choice="required",
        parallel_tool_calls=False, max_tokens=60,
    )  # fmt: skip
    calls = answer.choices[0].message.tool_calls
    assert calls and isinstance(calls[0].function.parsed_arguments, Weather)


def test_stream_helper(client: openai.OpenAI) -> None:
    """structured output, streamed with the client's helper"""
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=City, max_tokens=60) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)
    assert {"content.delta", "content.done"} <= kinds


def test_json_mode(client: openai.OpenAI) -> None:
    """JSON mode"""
    answer = client.chat.completions.create(
        model=MODEL, messages=JSON_MESSAGES, response_format={"type": "json_object"}, temperature=0, max_tokens=60
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings(client: openai.OpenAI, encoding: Any) -> None:
    """embeddings"""
    answer = client.embeddings.create(model=MODEL, input=["a cat", "a dog"], encoding_format=encoding)
    assert len(answer.data) == 2 and answer.usage.prompt_tokens > 2
    if encoding == "float":
        assert math.isclose(math.hypot(*answer.data[0].embedding), 1, abs_tol=1e-3)
    small = client.embeddings.create(model=MODEL, input="a cat", dimensions=32)
    assert len(small.data[0].embedding) == 32


def test_responses(client: openai.OpenAI) -> None:
    """Responses"""
    answer = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=16)
    assert answer.status in ("completed", "incomplete") and "Paris" in answer.output_text
    assert answer.usage is not None and answer.usage.output_tokens > 0


def test_responses_streamed(client: openai.OpenAI) -> None:
    """Responses, streamed"""
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=16) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text != ""


def test_responses_previous(client: openai.OpenAI) -> None:
    """Responses: previous_response_id"""
    first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=8)
    second = client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=first.id, max_output_tokens=8
    )
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens


def test_responses_input(client: openai.OpenAI) -> None:
    """Responses: input_tokens and input_items"""
    counted = client.responses.input_tokens.count(model=MODEL, input=QUESTION)
    answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=4)
    assert answer.usage is not None and counted.input_tokens == answer.usage.input_tokens
    hints: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    (item,) = client.responses.input_items.list(answer.id, include=hints)
    assert item.type == "message" and item.content[0].type == "input_text" and item.content[0].text == QUESTION


def test_responses_tool(client: openai.OpenAI) -> None:
    """Responses: tools and their results"""
    tool: Any = {"type": "function", "strict": True, **TOOL["function"]}
    first = client.responses.create(
        model=MODEL, input=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=60,
    )  # fmt: skip
    call = next(item for item in first.output if item.type == "function_call")
    Weather.model_validate_json(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    items: Any = [{"role": "user", "content": QUESTION}, *first.output, result]
    second = client.responses.create(
        model=MODEL, input=items, tools=[tool], tool_choice="none", temperature=0, max_output_tokens=8
    )
    assert second.output_text


def test_responses_parse(client: openai.OpenAI) -> None:
    """Responses: `parse` with a pydantic model"""
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=City, max_output_tokens=60)
    assert isinstance(answer.output_parsed, City)


def test_logprobs(client: openai.OpenAI) -> None:
    """log probabilities"""
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=3, temperature=0, max_tokens=4
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        assert token.logprob == max(other.logprob for other in token.top_logprobs)


def test_reasoning(thinking: ServedModel) -> None:
    """reasoning in a field of its own"""
    with openai.OpenAI(base_url=thinking.openai, api_key=thinking.key, max_retries=0, timeout=LIMIT_S) as client:
        request: dict[str, Any] = {
            "model": MODEL, "messages": MESSAGES, "max_tokens": 40, "extra_body": {"grammar": REASONED}
        }  # fmt: skip
        message: Any = client.chat.completions.create(**request).choices[0].message
        assert message.reasoning_content and message.content and "think" not in message.content
        thoughts, texts = "", ""
        for event in client.chat.completions.create(**request, stream=True):
            delta: Any = event.choices[0].delta
            thoughts += getattr(delta, "reasoning_content", None) or ""
            texts += delta.content or ""
        assert thoughts and texts and "think" not in texts


def test_errors(served: ServedModel, client: openai.OpenAI) -> None:
    """errors of the client's own types: 400, 401, 404, 429"""
    with pytest.raises(openai.BadRequestError, match="maximum context length") as long:
        client.chat.completions.create(model=MODEL, messages=TOO_LONG)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with served.busy(), pytest.raises(openai.RateLimitError) as full:
        client.with_options(api_key=served.limited_key).chat.completions.create(model=MODEL, messages=MESSAGES)
    assert int(full.value.response.headers["retry-after"]) >= 1


def test_cancel(served: ServedModel, client: openai.OpenAI) -> None:
    """a stream that is left ends at once"""
    stream = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert not served.idle()
    stream.close()
    until(served.idle)


async def test_async(served: ServedModel) -> None:
    """async"""
    async with openai.AsyncOpenAI(base_url=served.openai, api_key=served.key, timeout=LIMIT_S) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16, stream=True
        )
        text = "".join([event.choices[0].delta.content or "" async for event in stream])
        assert "Paris" in text
        parsed = await client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=City, max_tokens=60
        )
        assert isinstance(parsed.choices[0].message.parsed, City)
