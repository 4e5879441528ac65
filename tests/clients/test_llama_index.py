"""llama-index, by its OpenAILike classes."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from openai import BadRequestError

from clients_kit import CONTEXT, LIMIT_S, MODEL, QUESTION, TOO_LONG, City, ServedModel, Weather

CLIENT = "llama-index"
pytestmark = pytest.mark.model
ASKED = [ChatMessage(role="user", content=QUESTION)]


def weather(city: str, unit: str) -> str:
    """The weather now."""
    return f"18 degrees {unit} in {city}"


TOOL = FunctionTool.from_defaults(weather, fn_schema=Weather)
REQUIRED: Any = {"user_msg": "How warm is it in Rome?", "tool_required": True, "allow_parallel_tool_calls": False}


@pytest.fixture(scope="module")
def llm(served: ServedModel) -> OpenAILike:
    return OpenAILike(
        model=MODEL, api_base=served.openai, api_key=served.key, is_chat_model=True, is_function_calling_model=True,
        context_window=CONTEXT, max_tokens=60, temperature=0, max_retries=0, timeout=LIMIT_S,
    )  # fmt: skip


def test_chat(llm: OpenAILike) -> None:
    """chat"""
    assert "Paris" in (llm.chat(ASKED).message.content or "")


def test_stream(llm: OpenAILike) -> None:
    """chat, streamed"""
    assert "Paris" in "".join(piece.delta or "" for piece in llm.stream_chat(ASKED))


def test_completion(served: ServedModel) -> None:
    """completions"""
    plain = OpenAILike(model=MODEL, api_base=served.openai, api_key=served.key, is_chat_model=False, max_tokens=8)
    assert plain.complete("The capital of France is").text


def test_tool(llm: OpenAILike) -> None:
    """tools: required, whole and streamed"""
    (call,) = llm.get_tool_calls_from_response(llm.chat_with_tools([TOOL], **REQUIRED))
    *_, last = llm.stream_chat_with_tools([TOOL], **REQUIRED)
    (streamed,) = llm.get_tool_calls_from_response(last)
    for each in (call, streamed):
        assert each.tool_name == "weather"
        Weather.model_validate(each.tool_kwargs)


def test_structured_output(llm: OpenAILike) -> None:
    """structured output: `as_structured_llm` with a pydantic model"""
    assert isinstance(llm.as_structured_llm(City).complete(QUESTION).raw, City)


def test_embeddings(served: ServedModel) -> None:
    """embeddings"""
    embedding = OpenAILikeEmbedding(model_name=MODEL, api_base=served.openai, api_key=served.key, embed_batch_size=2)
    vectors = embedding.get_text_embedding_batch(["a cat", "a dog", "a cat"])
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-4) and len(vectors[1]) > 100


def test_errors(llm: OpenAILike) -> None:
    """errors: those of openai"""
    with pytest.raises(BadRequestError, match="maximum context length"):
        llm.chat([ChatMessage(role="user", content=TOO_LONG[0]["content"])])


async def test_async(llm: OpenAILike) -> None:
    """async"""
    stream = await llm.astream_chat(ASKED)
    assert "Paris" in "".join([piece.delta or "" async for piece in stream])
