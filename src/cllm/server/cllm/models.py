"""`/models`: loading and unloading one of several models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from pydantic import ConfigDict, Field

from cllm.server.openai.replies import ServedCard
from cllm.server.openai.routes import served_card
from cllm.server.schema.body import JsonBody
from cllm.server.schema.replies import ErrorReply, error_responses
from cllm.server.schema.validation import ModelName, RequestModel
from cllm.server.state import ServerState, State

if TYPE_CHECKING:
    from cllm.served.model_set import Sharing

router = APIRouter(prefix="/models", tags=["Models"])

_ERRORS = error_responses(ErrorReply, 400, 401, 403, 404, 413, 500, 503)


class LoadRequest(RequestModel):
    model_config = ConfigDict(json_schema_extra={"example": {"model": "smollm2"}})

    model: ModelName


class UnloadRequest(LoadRequest):
    wait: bool | None = Field(None, description="Wait for its requests to end instead of refusing. Default false.")


@router.post("/load", responses=_ERRORS)
async def load(body: JsonBody[LoadRequest], state: State) -> ServedCard:
    """Load a model; answered when it is ready. Others may be unloaded to make room."""
    sharing, served = _sharing(state), state.find(body.model)
    await sharing.load(served)
    return served_card(served, state.created, sees_all=True)


@router.post("/unload", responses={**_ERRORS, **error_responses(ErrorReply, 409)})
async def unload(body: JsonBody[UnloadRequest], state: State) -> ServedCard:
    """Unload a model. If it has running requests, refuse (409), or wait for them. The next request loads it again."""
    sharing, served = _sharing(state), state.find(body.model)
    await sharing.unload(served, wait=bool(body.wait))
    return served_card(served, state.created, sees_all=True)


def _sharing(state: ServerState) -> Sharing:
    """These routes are there only if there is something to share."""
    assert state.serves.sharing is not None
    return state.serves.sharing
