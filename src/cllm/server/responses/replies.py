"""Replies of OpenAI's Responses as models, for the API's description."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from cllm.server.schema.replies import COMPUTED_TOKENS, KNOWN_TOKENS


class InputTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Prompt tokens found in the KV cache.")
    cache_write_tokens: int
    known_tokens: int | None = Field(None, description=KNOWN_TOKENS)
    computed_tokens: int | None = Field(None, description=COMPUTED_TOKENS)


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseReply(BaseModel):
    """Also has fields of the request: `tools`, `text`, `metadata` and the like."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: str = Field(description="`completed`, or `incomplete` where the answer was cut off.")
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]] = Field(description="Items of type `message`, `function_call` or `reasoning`.")
    usage: ResponseUsage | None
    store: bool = Field(description="Whether it is kept for previous_response_id.")


class InputTokensReply(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputItemsReply(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]] = Field(
        description="Items of type `message`, `function_call`, `function_call_output` or `reasoning`."
    )
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedReply(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
