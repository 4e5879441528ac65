"""`/kv/warm`: compute and pin prefixes, for one key or, as the operator, for all; and unpin them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from cllm.engine.submission import Submission
from cllm.engine.tenant import Tenant
from cllm.llm import ONE_TOKEN
from cllm.server.errors import ApiError
from cllm.server.http.response import unless_gone
from cllm.server.middleware import not_the_operator
from cllm.server.schema.body import json_body
from cllm.server.schema.messages import ChatMessage
from cllm.server.schema.replies import ErrorReply, error_responses
from cllm.server.schema.validation import AtMost, RequestModel, Words, refusal
from cllm.server.state import ModelState, ServerState, State, is_operator, tenant_of
from cllm.tasks.warm import pin_mark
from cllm.work.turns import for_nobody

if TYPE_CHECKING:
    from cllm.llm import AsyncLLM
    from cllm.served import ServedModel

router = APIRouter(tags=["Operations"])


MOST_TTL_S = 86400


class WarmRequest(RequestModel):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {"messages": [{"role": "system", "content": "You are a helpful assistant."}], "ttl_s": 3600},
            "oneOf": [
                {"required": [one], "properties": {one: {"not": {"type": "null"}}, other: {"type": "null"}}}
                for one, other in (("prompt", "messages"), ("messages", "prompt"))
            ],
        }
    )

    model: str | None = Field(None, description="If there are several; default: the first.")
    prompt: Words | None = Field(None, description="The beginning of prompts.")
    messages: (
        Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1), AtMost("max_messages", "messages")] | None
    ) = Field(None, description="The first messages of chats, instead of a prompt.")
    pin: bool = Field(True, description="Protect it from eviction.")
    ttl_s: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="How long the pin lasts. Default: as long as the server. If every key has cached prefixes "
        f"of its own: {MOST_TTL_S}, which is also the maximum, except for the operator.",
    )
    shared: bool = Field(
        False, description="For all keys, if each has cached prefixes of its own; requires the operator's key."
    )

    def contradictions(self) -> Iterator[PydanticCustomError]:
        if (self.prompt is None) == (self.messages is None):
            yield refusal("prompt", "is missing: send either prompt or messages")


class WarmReply(BaseModel):
    id: str | None = Field(description="Id of the pin, for DELETE /kv/warm/{id}; null without one.")
    tokens: int
    cached_tokens: int = Field(description="Tokens that were already cached.")
    pinned_tokens: int = Field(description="Whole blocks are pinned.")
    ttl_s: float | None = Field(
        description="What is left of the pin's time: more than was asked for where it is pinned for longer already. "
        "Null: it has no end, or there is none."
    )
    seconds: float


@asynccontextmanager
async def warming_up(state: ServerState) -> AsyncIterator[None]:
    """Compute `kv.warm` before or while the server runs. With several models, it is computed when one is loaded."""
    if state.one is not None:
        await _run(state, state.one, state.warm_up(state.one))
    try:
        yield
    finally:
        for task in state.background:
            task.cancel()
        await asyncio.gather(*state.background, return_exceptions=True)


async def on_model_loaded(state: ServerState, served: ServedModel, llm: AsyncLLM) -> None:
    """Called when one of several models is loaded; no request uses it before this returns."""
    model = state.state_of(served, llm)

    async def work() -> None:
        with served.awaited():  # not idle meanwhile
            await state.warm_up(model)

    await _run(state, model, work())


async def _run(state: ServerState, model: ModelState, work: Coroutine[Any, Any, None]) -> None:
    if model.config.kv.warm_before_ready:
        await work
        return
    task = asyncio.create_task(for_nobody(work))
    state.background.add(task)
    task.add_done_callback(state.background.discard)


@router.post(
    "/kv/warm",
    response_model=WarmReply,
    responses=error_responses(ErrorReply, 400, 401, 403, 404, 408, 409, 413, 429, 500, 503),
)
async def warm_prefix(
    body: Annotated[WarmRequest, Depends(json_body(WarmRequest))], request: Request, state: State
) -> Response:
    """Compute the K/V of a prefix for later requests, and pin it."""
    tenant, ttl_s = _for_whom(body, request, state)
    model = await state.model(body.model, request)
    prompt: Sequence[int]
    if body.messages is not None:
        prompt = await model.encoder.encode_beginning([message.plain() for message in body.messages])
    else:
        assert body.prompt is not None
        prompt = await model.encoder.encode_prompt(body.prompt)
    pins = [pin_mark(prompt, ttl_s, "warm" if is_operator(request) else "request")] if body.pin else []
    asked = Submission(prompt, ONE_TOKEN, f"warm-{request.state.unique_id}", tenant=tenant, pins=pins)
    done = await unless_gone(request.receive, model.llm.warm(asked))
    if done.refusal is not None:
        raise ApiError(
            409,
            f"The prefix of {done.tokens} tokens was computed and is cached, but not pinned: {done.refusal}.",
            code="not_pinned",
            param="pin",
        )
    reply = WarmReply(
        id=done.pin_id,
        tokens=done.tokens,
        cached_tokens=done.cached,
        pinned_tokens=done.pinned_tokens,
        ttl_s=done.left_s,
        seconds=done.seconds,
    )
    return Response(reply.model_dump_json(), media_type="application/json")


@router.delete("/kv/warm/{pin_id}", status_code=204, responses=error_responses(ErrorReply, 401, 403, 404, 409, 503))
async def unpin(pin_id: str, request: Request, state: State, model: str | None = None) -> Response:
    """Remove a pin: the operator any, others their own. What it held stays cached like anything else."""
    space = None if is_operator(request) else tenant_of(request).space
    if not await state.loaded(model).llm.executor.unpin(pin_id, space):
        hint = "; GET /kv lists them" if is_operator(request) else ""
        raise ApiError(404, f"Unknown or expired pin{hint}.", code="pin_not_found")
    return Response(status_code=204)


def _for_whom(body: WarmRequest, request: Request, state: ServerState) -> tuple[Tenant, float | None]:
    """The tenant to pin for, and for how long."""
    if is_operator(request):
        shared = state.warm_tenant(True) if body.shared else None
        return shared or tenant_of(request), body.ttl_s
    if body.shared:
        raise not_the_operator("shared")
    if body.ttl_s is not None and body.ttl_s > MOST_TTL_S:
        problem = f"ttl_s is {body.ttl_s:g}: it may be {MOST_TTL_S} at most without the operator's key."
        raise ApiError(400, problem, param="ttl_s")
    return tenant_of(request), body.ttl_s or MOST_TTL_S
