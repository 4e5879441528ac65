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
    from collections.abc import Sequence

    from cllm.served import ServedModel
    from cllm.served.model_set import Sharing

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
    loaded = [name for name, _ in state.running()]
    return Health(status="ok", model_loaded=bool(loaded), model=loaded[0] if loaded else None)


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
    sharing = state.serves.sharing
    if sharing is None:
        return state.loaded(model).llm.executor.kv()
    shown = model or next((name for name, _ in state.running()), None)
    content = {} if shown is None else state.loaded(shown).llm.executor.kv()
    name = None if shown is None else state.find(shown).name
    return {"model": name, **content, "models": _models(sharing, state.serves.models)}


def _models(sharing: Sharing, models: Sequence[ServedModel]) -> dict[str, Any]:
    """What each takes of the memory that all share."""
    taken = {status.name: status for status in sharing.account_status()}
    return {
        "budget_bytes": sharing.budget,
        "resident_bytes": resident_bytes(),
        "taken_bytes": sum(status.fixed + status.kv for status in taken.values()),
        "models": [
            {
                "name": served.name,
                "state": served.state,
                "fixed_bytes": taken[served.name].fixed if served.name in taken else 0,
                "kv_bytes": taken[served.name].kv if served.name in taken else 0,
            }
            for served in models
        ],
    }
