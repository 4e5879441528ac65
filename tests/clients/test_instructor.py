"""instructor, over openai and anthropic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anthropic
import instructor
import openai
import pytest
from instructor import Mode

from clients_kit import (
    CITY_SCHEMA,
    JSON_MESSAGES,
    LIMIT_S,
    MESSAGES,
    MODEL,
    TWO_CALLS,
    Anything,
    City,
    ServedModel,
    Weather,
)

CLIENT = "instructor"
pytestmark = pytest.mark.model
GUIDED: Any = {"structured_outputs": {"json": CITY_SCHEMA}}
"""For modes that only ask the model to write what fits."""


def patched(served: ServedModel, mode: Mode) -> Any:
    client = openai.OpenAI(base_url=served.openai, api_key=served.key, max_retries=0, timeout=LIMIT_S)
    return instructor.from_openai(client, mode=mode)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.FUNCTIONS, Mode.JSON_SCHEMA, Mode.JSON_O1])
def test_guaranteed_modes(served: ServedModel, mode: Mode) -> None:
    """modes TOOLS, TOOLS_STRICT, FUNCTIONS, JSON_SCHEMA and JSON_O1: answers fit the schema for certain"""
    client = patched(served, mode)
    city = client.create(model=MODEL, messages=MESSAGES, response_model=City, max_retries=0, max_tokens=60)
    assert isinstance(city, City)


@pytest.mark.parametrize("mode", [Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS])
def test_responses(served: ServedModel, mode: Mode) -> None:
    """modes RESPONSES_TOOLS and RESPONSES_TOOLS_WITH_INBUILT_TOOLS"""
    client = patched(served, mode)
    assert isinstance(client.create(model=MODEL, messages=MESSAGES, response_model=City, max_retries=0), City)


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.MD_JSON])
def test_prompted_modes(served: ServedModel, mode: Mode) -> None:
    """modes JSON and MD_JSON: the model is asked, and may be held to it with structured_outputs"""
    client = patched(served, mode)
    request: dict[str, Any] = {"model": MODEL, "max_retries": 0, "max_tokens": 120, "temperature": 0}
    if mode is Mode.JSON:
        assert isinstance(client.create(messages=JSON_MESSAGES, response_model=Anything, **request), Anything)
    else:
        city = client.create(messages=MESSAGES, response_model=City, extra_body=GUIDED, **request)
        assert isinstance(city, City)


def test_parallel_tools(served: ServedModel) -> None:
    """mode PARALLEL_TOOLS"""
    client = patched(served, Mode.PARALLEL_TOOLS)
    found = client.create(
        model=MODEL, messages=MESSAGES, response_model=Iterable[Weather | City], max_retries=0, max_tokens=400,
        temperature=0, extra_body={"tool_choice": "required", **TWO_CALLS},
    )  # fmt: skip
    assert len([each for each in found if isinstance(each, Weather | City)]) > 1


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_partial(served: ServedModel, mode: Mode) -> None:
    """a partial object, streamed"""
    client = patched(served, mode)
    *_, last = client.create_partial(model=MODEL, messages=MESSAGES, response_model=City, max_tokens=60)
    assert last.name in ("Paris", "Rome", "Berlin") and last.size in ("small", "large")


@pytest.mark.parametrize("mode", [Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON])
def test_anthropic(served: ServedModel, mode: Mode) -> None:
    """modes ANTHROPIC_TOOLS and ANTHROPIC_JSON"""
    own = anthropic.Anthropic(base_url=served.url, api_key=served.key, max_retries=0, timeout=LIMIT_S)
    client: Any = instructor.from_anthropic(own, mode=mode)
    guided = {} if mode is Mode.ANTHROPIC_TOOLS else {"extra_body": GUIDED}
    request: Any = {"model": MODEL, "max_tokens": 120, "messages": [*MESSAGES], "max_retries": 0, **guided}
    assert isinstance(client.create(response_model=City, **request), City)


async def test_async(served: ServedModel) -> None:
    """async"""
    own = openai.AsyncOpenAI(base_url=served.openai, api_key=served.key, max_retries=0, timeout=LIMIT_S)
    client = instructor.from_openai(own, mode=Mode.TOOLS)
    city: Any = await client.create(model=MODEL, messages=MESSAGES, response_model=City, max_retries=0, max_tokens=60)
    assert isinstance(city, City)
