"""langchain-anthropic."""

from __future__ import annotations

from typing import Literal

import anthropic
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool

from clients_kit import LIMIT_S, MODEL, QUESTION, TOO_LONG, City, ServedModel

CLIENT = "langchain-anthropic"
pytestmark = pytest.mark.model


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather now."""
    return f"18 degrees in {city}"


@pytest.fixture(scope="module")
def model(served: ServedModel) -> ChatAnthropic:
    return ChatAnthropic(
        model=MODEL, base_url=served.url, api_key=served.key, max_tokens=60, temperature=0, max_retries=0,
        timeout=LIMIT_S,
    )  # type: ignore[call-arg]  # fmt: skip


def test_chat(model: ChatAnthropic) -> None:
    """chat, whole and streamed, with usage"""
    answer = model.invoke(QUESTION)
    assert "Paris" in answer.text and answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0
    assert "Paris" in "".join(piece.text for piece in model.stream(QUESTION))


def test_tool(model: ChatAnthropic) -> None:
    """`bind_tools`: required, and the result back"""
    asked = HumanMessage("How warm is it in Rome?")
    answer = model.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False).invoke([asked])
    (call,) = answer.tool_calls
    assert call["name"] == "weather"
    result = ToolMessage("18 degrees", tool_call_id=call["id"])
    model.bind_tools([weather]).invoke([asked, answer, result])


def test_structured_output(model: ChatAnthropic) -> None:
    """`with_structured_output`: function_calling, json_schema"""
    for method in ("function_calling", "json_schema"):
        assert isinstance(model.with_structured_output(City, method=method).invoke(QUESTION), City)


def test_errors(model: ChatAnthropic) -> None:
    """errors: those of anthropic"""
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        model.invoke(TOO_LONG[0]["content"])
