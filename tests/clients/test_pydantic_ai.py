"""pydantic-ai, over OpenAI's two APIs and Anthropic's."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from anthropic import AsyncAnthropic
from pydantic_ai import (
    Agent,
    Embedder,
    ModelHTTPError,
    NativeOutput,
    PromptedOutput,
    ToolOutput,
    UsageLimitExceeded,
    UsageLimits,
)
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from clients_kit import LIMIT_S, MODEL, QUESTION, REASONED, TOO_LONG, City, ServedModel

CLIENT = "pydantic-ai"
pytestmark = pytest.mark.model
SETTINGS: Any = {"temperature": 0, "max_tokens": 60, "parallel_tool_calls": False}
APIS = ["chat", "responses", "anthropic"]


def model_of(served: ServedModel, api: str = "chat", name: str = MODEL) -> Any:
    if api == "anthropic":
        client = AsyncAnthropic(base_url=served.url, api_key=served.key, max_retries=0, timeout=LIMIT_S)
        profile: Any = {"supports_json_schema_output": True}  # which it does not know of other models than Anthropic's
        return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client), profile=profile)
    provider = OpenAIProvider(base_url=served.openai, api_key=served.key)
    return (OpenAIResponsesModel if api == "responses" else OpenAIChatModel)(name, provider=provider)


@pytest.mark.parametrize("api", APIS)
async def test_agent(served: ServedModel, api: str) -> None:
    """an agent, over chat, Responses and Anthropic's API"""
    result = await Agent(model_of(served, api), model_settings=SETTINGS).run(QUESTION)
    assert "Paris" in result.output
    assert result.usage.output_tokens > 0


@pytest.mark.parametrize("api", APIS)
async def test_stream(served: ServedModel, api: str) -> None:
    """an agent, streamed"""
    async with Agent(model_of(served, api), model_settings=SETTINGS).run_stream(QUESTION) as result:
        assert "Paris" in "".join([text async for text in result.stream_text(delta=True)])


@pytest.mark.parametrize("api", APIS)
async def test_output_type(served: ServedModel, api: str) -> None:
    """an output type, by a tool"""
    agent = Agent(model_of(served, api), output_type=ToolOutput(City), retries=0, model_settings=SETTINGS)
    assert isinstance((await agent.run(QUESTION)).output, City)


@pytest.mark.parametrize("api", APIS)
async def test_native_output(served: ServedModel, api: str) -> None:
    """an output type, by a schema"""
    agent = Agent(model_of(served, api), output_type=NativeOutput(City), retries=0, model_settings=SETTINGS)
    assert isinstance((await agent.run(QUESTION)).output, City)


async def test_prompted_output(served: ServedModel) -> None:
    """an output type, by asking, held to it with structured_outputs"""
    settings: Any = {**SETTINGS, "extra_body": {"structured_outputs": {"json": City.model_json_schema()}}}
    model = OpenAIChatModel(
        MODEL,
        provider=OpenAIProvider(base_url=served.openai, api_key=served.key),
        profile={"supports_json_object_output": False},
    )
    agent = Agent(model, output_type=PromptedOutput(City), retries=0, model_settings=settings)
    assert isinstance((await agent.run(QUESTION)).output, City)


@pytest.mark.parametrize("api", APIS)
async def test_tool(served: ServedModel, api: str) -> None:
    """an agent with a tool, its result and an output type"""
    agent = Agent(model_of(served, api), output_type=ToolOutput(City), retries=0, model_settings=SETTINGS)
    asked: list[str] = []

    @agent.tool_plain
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather now."""
        asked.append(city)
        return "18 degrees"

    # The model may go on asking for the weather: then it is out of requests, and each of them was understood.
    limit = UsageLimits(request_limit=3)
    try:
        result = await agent.run(QUESTION, usage_limits=limit)
    except UsageLimitExceeded:
        assert len(asked) == 3
    else:
        assert isinstance(result.output, City)


async def test_reasoning(thinking: ServedModel) -> None:
    """reasoning as a part of its own"""
    settings: Any = {"max_tokens": 40, "extra_body": {"grammar": REASONED}}
    result = await Agent(model_of(thinking), model_settings=settings).run(QUESTION)
    parts = [part for message in result.new_messages() for part in message.parts]
    assert any(isinstance(part, ThinkingPart) for part in parts) and "think" not in result.output


async def test_embeddings(served: ServedModel) -> None:
    """embeddings"""
    provider = OpenAIProvider(base_url=served.openai, api_key=served.key)
    result = await Embedder(OpenAIEmbeddingModel(MODEL, provider=provider)).embed_documents(["a cat", "a dog"])
    assert len(result.embeddings) == 2 and len(result.embeddings[0]) > 100


async def test_errors(served: ServedModel) -> None:
    """errors: ModelHTTPError with the status"""
    with pytest.raises(ModelHTTPError) as long:
        await Agent(model_of(served)).run(TOO_LONG[0]["content"])
    assert long.value.status_code == 400 and "maximum context length" in str(long.value.body)
    with pytest.raises(ModelHTTPError) as unknown:
        await Agent(model_of(served, name="no-such-model")).run(QUESTION)
    assert unknown.value.status_code == 404
