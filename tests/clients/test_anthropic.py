"""anthropic for Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from clients_kit import (
    CITY_SCHEMA,
    FUNCTION,
    LIMIT_S,
    MESSAGES,
    MODEL,
    PARAMETERS,
    REASONED,
    TOO_LONG,
    TWO_CALLS,
    City,
    ServedModel,
    Weather,
)
from server_process import until

CLIENT = "anthropic"
pytestmark = pytest.mark.model
TOOL: Any = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": PARAMETERS}
GREEDY = {"temperature": 0}
"""Newer versions of the client have no parameter for it."""
ANY: Any = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def client(served: ServedModel) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key=served.key, max_retries=0, timeout=LIMIT_S) as client:
        yield client


def test_message(client: anthropic.Anthropic) -> None:
    """messages"""
    answer = client.messages.create(model=MODEL, max_tokens=16, messages=MESSAGES, extra_body=GREEDY)
    assert answer.content[0].type == "text" and "Paris" in answer.content[0].text
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > 10


def test_stream(client: anthropic.Anthropic) -> None:
    """messages, streamed, with usage at the end"""
    with client.messages.stream(model=MODEL, max_tokens=16, messages=MESSAGES, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "Paris" in text and final.usage.output_tokens > 0


def test_system_and_cache_control(client: anthropic.Anthropic) -> None:
    """system blocks and cache_control"""
    system: Any = [{"type": "text", "text": "You are brief. " * 40, "cache_control": {"type": "ephemeral"}}]
    for _ in range(2):
        answer = client.messages.create(model=MODEL, max_tokens=4, system=system, messages=MESSAGES)
    assert (answer.usage.cache_read_input_tokens or 0) > 100


@pytest.mark.parametrize(
    "choice", [ANY, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}], ids=["any", "named"]
)
def test_tool(client: anthropic.Anthropic, choice: Any) -> None:
    """tools: any and named"""
    answer = client.messages.create(model=MODEL, max_tokens=60, messages=MESSAGES, tools=[TOOL], tool_choice=choice)
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and len(calls) == 1 and calls[0].name == "weather"
    Weather.model_validate(calls[0].input)


def test_tool_streamed(client: anthropic.Anthropic) -> None:
    """tools, streamed"""
    with client.messages.stream(model=MODEL, max_tokens=60, messages=MESSAGES, tools=[TOOL], tool_choice=ANY) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert "".join(pieces)
    call = next(block for block in final.content if block.type == "tool_use")
    Weather.model_validate(call.input)


def test_parallel_tools(client: anthropic.Anthropic) -> None:
    """tools: several calls in one answer"""
    answer = client.messages.create(
        model=MODEL, max_tokens=400, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "any"},
        extra_body={**GREEDY, **TWO_CALLS},
    )  # fmt: skip
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert len(calls) > 1 and len({call.id for call in calls}) == len(calls)


def test_tool_result(client: anthropic.Anthropic) -> None:
    """tool results back"""
    first = client.messages.create(model=MODEL, max_tokens=60, messages=MESSAGES, tools=[TOOL], tool_choice=ANY)
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
    history: Any = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(
        model=MODEL, max_tokens=8, messages=history, tools=[TOOL], tool_choice={"type": "none"}, extra_body=GREEDY
    )
    assert second.content[0].type == "text"


def test_tool_runner(client: anthropic.Anthropic) -> None:
    """`tool_runner`: a tool that is called, its result back"""
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather now."""
        asked.append(city)
        return "18 degrees"

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=60, messages=MESSAGES, tools=[weather], tool_choice=ANY, max_iterations=2
    )
    assert len([message for message in runner if message.stop_reason]) == 2 and asked


def test_parse(client: anthropic.Anthropic) -> None:
    """structured output: `parse` with a pydantic model"""
    answer = client.messages.parse(model=MODEL, max_tokens=60, messages=MESSAGES, output_format=City)
    assert isinstance(answer.parsed_output, City)


def test_json_schema(client: anthropic.Anthropic) -> None:
    """structured output: output_config"""
    form: Any = {"format": {"type": "json_schema", "schema": CITY_SCHEMA}}
    answer = client.messages.create(model=MODEL, max_tokens=60, messages=MESSAGES, output_config=form)
    assert answer.content[0].type == "text"
    City.model_validate_json(answer.content[0].text)


def test_count_tokens(client: anthropic.Anthropic) -> None:
    """count_tokens"""
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, tools=[TOOL])
    assert counted.input_tokens > client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 10


def test_models(client: anthropic.Anthropic) -> None:
    """list of models"""
    assert MODEL in [model.id for model in client.models.list()]


def test_thinking(thinking: ServedModel) -> None:
    """reasoning as a thinking block"""
    body = {"grammar": REASONED}
    with anthropic.Anthropic(base_url=thinking.url, api_key=thinking.key, timeout=LIMIT_S) as client:
        answer = client.messages.create(model=MODEL, max_tokens=40, messages=MESSAGES, extra_body=body)
    assert [block.type for block in answer.content] == ["thinking", "text"]


def test_errors(served: ServedModel, client: anthropic.Anthropic) -> None:
    """errors of the client's own types: 400, 401, 404, 429"""
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model=MODEL, max_tokens=8, messages=TOO_LONG)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=8, messages=MESSAGES)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="no-such-model", max_tokens=8, messages=MESSAGES)
    with served.busy(), pytest.raises(anthropic.RateLimitError):
        client.with_options(api_key=served.limited_key).messages.create(model=MODEL, max_tokens=8, messages=MESSAGES)


def test_cancel(served: ServedModel, client: anthropic.Anthropic) -> None:
    """a stream that is left ends at once"""
    with client.messages.stream(
        model=MODEL, max_tokens=1500, messages=MESSAGES, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream.text_stream))
        assert not served.idle()
    until(served.idle)


async def test_async(served: ServedModel) -> None:
    """async"""
    async with (
        anthropic.AsyncAnthropic(base_url=served.url, api_key=served.key, timeout=LIMIT_S) as client,
        client.messages.stream(model=MODEL, max_tokens=16, messages=MESSAGES, extra_body=GREEDY) as stream,
    ):
        assert "Paris" in "".join([text async for text in stream.text_stream])
