"""Anthropic's replies as models, for the API's description."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from cllm.server.schema.replies import CacheDetailsReply


class AnthropicUsage(BaseModel):
    input_tokens: int = Field(description="Prompt tokens neither cached nor marked with cache_control.")
    cache_creation_input_tokens: int = Field(
        description="Prompt tokens before a cache_control mark that were computed."
    )
    cache_read_input_tokens: int = Field(description="Prompt tokens found in the KV cache.")
    output_tokens: int
    cache_details: CacheDetailsReply | None = Field(None, description="Only with return_cache_details.")


class MessageReply(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]] = Field(description="Blocks of type `text`, `thinking` or `tool_use`.")
    stop_reason: str = Field(
        description="`end_turn`, `max_tokens`, `stop_sequence`, `tool_use` or `model_context_window_exceeded`."
    )
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(BaseModel):
    input_tokens: int


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = Field(None, description="Of a refused `thread`: that all messages must be sent.")


class AnthropicError(BaseModel):
    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str | None


class AnthropicModel(BaseModel):
    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class AnthropicModels(BaseModel):
    data: list[AnthropicModel]
    has_more: bool = False
    first_id: str | None
    last_id: str | None
