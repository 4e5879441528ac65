"""Errors and streams in the API's description, for all endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from cllm.kv.groups import GroupCost, GroupKind


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="The parameter that was wrong.")
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorDetail


_CAUSES = {
    400: "The request is invalid; `param` names the parameter that is wrong.",
    401: "The API key is missing or wrong (only if the server requires one).",
    403: "The API key is not allowed to do this; use the operator's key (only if the server has several).",
    404: "Not found.",
    408: "The request passed its deadline.",
    409: "Conflict: the model is in use or not loaded, or there is no room for a pin.",
    413: "The body is larger than server.max_body_bytes.",
    429: "The queue is full, or the API key has reached its limit; try again after `Retry-After` seconds.",
    500: "The server failed on this request; its log has the details under `x-request-id`.",
    503: "The server is shutting down, or the model is unavailable.",
}


def error_responses(model: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the API's description: the errors an endpoint may return."""
    return {status: {"model": model, "description": _CAUSES[status]} for status in statuses}


KNOWN_TOKENS = (
    "Prompt tokens that were cached, but of which layers with a window or a state had kept too little to go on behind "
    "more than cached_tokens; only with return_cache_details."
)
COMPUTED_TOKENS = "All other prompt tokens than cached_tokens; only with return_cache_details."


class CacheDetailsReply(BaseModel):
    known_tokens: int = Field(description=KNOWN_TOKENS)
    computed_tokens: int = Field(description=COMPUTED_TOKENS)


class KVGroup(BaseModel):
    """Layers with equal needs, and what they take."""

    kind: GroupKind = Field(description="They keep all tokens (`full`), those in a window, or a state.")
    layers: int
    window: int = Field(description="Tokens that they attend to; 0: all.")
    bytes_per_token: int = Field(description="Of every token that they keep.")
    bytes_per_sequence: int | None = Field(
        description="The most that a running sequence takes; null: it grows with every token."
    )


def groups_of(costs: Sequence[GroupCost]) -> list[KVGroup]:
    return [KVGroup(**cost._asdict()) for cost in costs]


_EVENT = {
    "type": "object",
    "description": "A server-sent event; its data is a JSON object, and at the end `[DONE]`.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def event_stream(example: str) -> dict[int | str, dict[str, Any]]:
    """For the API's description: an endpoint that can also stream."""
    content = {"text/event-stream": {"schema": _EVENT, "example": example}}
    return {200: {"description": "The answer, whole or as a stream.", "content": content}}
