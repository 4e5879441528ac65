"""Several models: what each is doing, and loading and unloading by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends
from pydantic import ConfigDict, Field

from cllm.server.bodies import taken
from cllm.server.openai_replies import ErrorReply, ServedCard, error_responses
from cllm.server.openai_schema import ModelName
from cllm.server.state import State
from cllm.server.validation import RequestModel

if TYPE_CHECKING:
    from cllm.served import Served

router = APIRouter(prefix="/models", tags=["Models"])

_ERRORS = error_responses(ErrorReply, 400, 401, 403, 404, 413, 500, 503)


class LoadRequest(RequestModel):
    model_config = ConfigDict(json_schema_extra={"example": {"model": "smollm2"}})

    model: ModelName


class UnloadRequest(LoadRequest):
    wait: bool | None = Field(None, description="Wait for its requests to end instead of refusing. Default false.")


@router.post("/load", responses=_ERRORS)
async def load(body: Annotated[LoadRequest, Depends(taken(LoadRequest))], state: State) -> ServedCard:
    """Load a model; answered when it is ready. Others may be unloaded to make room."""
    assert state.several is not None
    served = state.find(body.model)
    await state.several.load(served)
    return served_card(served, state.created, sees_all=True)


@router.post("/unload", responses={**_ERRORS, **error_responses(ErrorReply, 409)})
async def unload(body: Annotated[UnloadRequest, Depends(taken(UnloadRequest))], state: State) -> ServedCard:
    """Unload a model. One with running requests is refused with 409, or waited for. The next request for it loads it
    again."""
    assert state.several is not None
    served = state.find(body.model)
    await state.several.unload(served, wait=bool(body.wait))
    return served_card(served, state.created, sees_all=True)


def served_card(served: Served, created: int, *, sees_all: bool) -> ServedCard:
    """`sees_all`: with what the requests of all keys do to it, and with paths and messages of this machine."""
    loaded = served.llm if served.ready else None
    taken = served.account.taken - served.estimate.weights if loaded and served.account is not None else 0
    names = served.names if sees_all else served.entry.aliases
    return ServedCard(
        id=served.name,
        created=created,
        max_model_len=loaded.max_context if loaded is not None else served.estimate.context,
        aliases=[name for name in names if name != served.name],
        state=served.state if served.state != "ready" or served.ready else "failed",
        error=served.error if sees_all else None,
        pinned=served.entry.pinned,
        requests=served.users if sees_all else None,
        weights_bytes=served.estimate.weights,
        kv_bytes=taken if sees_all else None,
        kv_bytes_per_token=served.estimate.token_bytes,
    )
