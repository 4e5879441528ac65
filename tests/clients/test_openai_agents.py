"""openai-agents, over OpenAI's two APIs, without its tracing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
)
from openai import AsyncOpenAI, BadRequestError

from clients_kit import LIMIT_S, MODEL, QUESTION, TOO_LONG, City, ServedModel

CLIENT = "openai-agents"
pytestmark = pytest.mark.model
SETTINGS = ModelSettings(temperature=0, max_tokens=60)
APIS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather now."""
    return f"18 degrees in {city}"


@pytest.fixture(params=APIS)
async def model(request: pytest.FixtureRequest, served: ServedModel) -> AsyncIterator[Any]:
    async with AsyncOpenAI(base_url=served.openai, api_key=served.key, max_retries=0, timeout=LIMIT_S) as client:
        yield APIS[request.param](model=MODEL, openai_client=client)


def agent(model: Any, **options: Any) -> Agent[Any]:
    return Agent(**{"name": "guide", "model": model, "model_settings": SETTINGS, **options})


async def test_agent(model: Any) -> None:
    """an agent, over chat and Responses"""
    result = await Runner.run(agent(model, instructions="Be brief."), QUESTION)
    assert "Paris" in result.final_output
    assert result.context_wrapper.usage.output_tokens > 0


async def test_stream(model: Any) -> None:
    """an agent, streamed"""
    result = Runner.run_streamed(agent(model), QUESTION)
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    assert "Paris" in result.final_output and kinds.count("response.output_text.delta") > 1


async def test_output_type(model: Any) -> None:
    """an output type"""
    assert isinstance((await Runner.run(agent(model, output_type=City), QUESTION)).final_output, City)


async def test_tool(model: Any) -> None:
    """a tool that must be called, and its result"""
    settings = ModelSettings(temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False)
    guide = agent(model, tools=[weather], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    assert (await Runner.run(guide, "How warm is it in Rome?")).final_output.startswith("18 degrees in ")


async def test_session(model: Any) -> None:
    """a session: tool results and answers back"""
    session = SQLiteSession("one")
    settings = ModelSettings(temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False)
    guide = agent(model, tools=[weather], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    await Runner.run(guide, "How warm is it in Rome?", session=session)
    result = await Runner.run(agent(model), QUESTION, session=session)
    assert len(await session.get_items()) >= 5 and isinstance(result.final_output, str)


async def test_errors(model: Any) -> None:
    """errors: those of openai"""
    with pytest.raises(BadRequestError, match="maximum context length"):
        await Runner.run(agent(model), TOO_LONG[0]["content"])
