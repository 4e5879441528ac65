"""`/v1/requests`: running and waiting requests, and cancelling them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from cllm.engine.stats import view_of
from cllm.server.errors import ApiError
from cllm.server.schema.replies import ErrorReply, error_responses
from cllm.server.state import ServerState, State, is_operator, tenant_of

if TYPE_CHECKING:
    from cllm.engine.request import Request as EngineRequest
    from cllm.llm import AsyncLLM

router = APIRouter(prefix="/v1", tags=["Operations"])


class RequestCard(BaseModel):
    id: str = Field(description="The id of its answer; where it has several prompts, with a number for each.")
    object: Literal["request"] = "request"
    model: str
    state: Literal["waiting", "running"]
    prompt_tokens: int
    computed_tokens: int = Field(description="Of the prompt, so far, those from the cache included.")
    cached_tokens: int
    generated_tokens: int = Field(description="Of all its answers.")
    answers: int
    age_s: float
    priority: int
    key: str = Field(description="The name of the API key it came with; empty where keys have no names.")


class RequestList(BaseModel):
    object: Literal["list"] = "list"
    data: list[RequestCard]


class RequestEnded(BaseModel):
    id: str
    object: Literal["request"] = "request"
    deleted: Literal[True] = True


@router.get("/requests", responses=error_responses(ErrorReply, 401))
async def requests(request: Request, state: State) -> RequestList:
    """Running and waiting requests: those of the caller's key, or of all keys for the operator."""
    now = time.monotonic()
    return RequestList(data=[_card(name, found, now) for name, _, found in _visible(state, request)])


@router.delete("/requests/{request_id}", responses=error_responses(ErrorReply, 401, 404))
async def end_request(request_id: str, request: Request, state: State) -> RequestEnded:
    """Cancel a request, by the id of its answer or by its `x-request-id`: its client gets the error `cancelled`; what
    it has computed stays cached."""
    why = f"request {request_id} was ended by DELETE /v1/requests"
    ended = [llm.end(found.id, why) for _, llm, found in _visible(state, request) if _is_of(found.id, request_id)]
    if not any(ended):
        message = f"No request {request_id!r} is running or waiting; GET /v1/requests lists all that are."
        raise ApiError(404, message, param="request_id", code="request_not_found")
    return RequestEnded(id=request_id)


def _visible(state: ServerState, request: Request) -> Iterator[tuple[str, AsyncLLM, EngineRequest]]:
    """(model, engine, request) of all requests that the key may see."""
    sees_all, tenant = is_operator(request), tenant_of(request)
    for name, llm in state.running():
        for found in llm.requests():
            if sees_all or found.submission.tenant == tenant:
                yield name, llm, found


def _is_of(found: str, asked: str) -> bool:
    """Whether `found` is the request `asked`, or one of its prompts. `asked` is the id of an answer, or what
    `x-request-id` says: of the latter, answers have a prefix before it, and where the client chose it, more behind."""
    whole = re.escape(asked)
    return re.fullmatch(rf"({whole}|[a-z]+[-_]{whole}(-[0-9a-f]{{12}})?)(-[0-9]+)?", found) is not None


def _card(model: str, request: EngineRequest, now: float) -> RequestCard:
    view = view_of(request, now)
    return RequestCard(
        id=view.id,
        model=model,
        state="running" if view.running else "waiting",
        prompt_tokens=view.prompt_tokens,
        computed_tokens=view.computed,
        cached_tokens=view.cached,
        generated_tokens=view.generated,
        answers=view.answers,
        age_s=round(view.age_s, 3),
        priority=request.submission.priority,
        key=request.submission.tenant.name,
    )
