"""Operations: health, readiness, metrics, and the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict

from cllm.machine.resident import resident_bytes
from cllm.server.schema.replies import ErrorReply, error_responses
from cllm.server.state import State

if TYPE_CHECKING:
    from cllm.served import ServedModels

router = APIRouter(tags=["Operations"])


class Health(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    status: str
    model_loaded: bool
    model: str | None


class Readiness(BaseModel):
    ready: bool


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(state: State) -> Health:
    """The process is alive. Needs no API key."""
    if state.several is not None:
        loaded = [served.name for served in state.several.models if served.ready]
        return Health(status="ok", model_loaded=bool(loaded), model=loaded[0] if loaded else None)
    assert state.one is not None
    is_loaded = state.one.llm.ready
    return Health(status="ok", model_loaded=is_loaded, model=state.one.served_name if is_loaded else None)


@router.head("/ready", include_in_schema=False)
@router.get(
    "/ready", response_model=Readiness, responses={503: {"model": Readiness, "description": "Not taking requests."}}
)
async def ready(state: State) -> Response:
    """The model is loaded and requests are accepted. Needs no API key."""
    is_ready = state.serves.ready
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


@router.head("/metrics", include_in_schema=False)
@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}},
)
async def metrics(state: State) -> Response:
    """Prometheus metrics. Needs no API key."""
    await state.serves.refresh()
    return Response(generate_latest(state.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/kv", responses=error_responses(ErrorReply, 401, 403, 404, 409))
async def kv(state: State, model: str | None = None) -> dict[str, Any]:
    """The KV cache: sizes, sequences, what is held. Of several models, that of `model` or of the first that is loaded,
    beside what all of them take (`models`), which is there alone if none is loaded."""
    await state.serves.refresh()
    several = state.several
    if several is None:
        return state.loaded(model).llm.executor.kv()
    shown = model or next((served.name for served in several.models if served.ready), None)
    content = {} if shown is None else state.loaded(shown).llm.executor.kv()
    return {"model": None if shown is None else state.find(shown).name, **content, "models": _models(several)}


def _models(several: ServedModels) -> dict[str, Any]:
    """What each takes of the memory that all share."""
    taken = {status.name: status for status in several.account_status()}
    return {
        "budget_bytes": several.budget,
        "resident_bytes": resident_bytes(),
        "taken_bytes": sum(status.fixed + status.kv for status in taken.values()),
        "models": [
            {
                "name": served.name,
                "state": served.state,
                "fixed_bytes": taken[served.name].fixed if served.name in taken else 0,
                "kv_bytes": taken[served.name].kv if served.name in taken else 0,
            }
            for served in several.models
        ],
    }
