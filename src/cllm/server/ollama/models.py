"""What Ollama's clients ask about models: `/api/tags`, `/api/ps`, `/api/show` and `/api/version`."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends

from cllm import __version__
from cllm.server.ollama.body import ollama_body
from cllm.server.ollama.replies import OllamaError
from cllm.server.ollama.schema import ShowRequest
from cllm.server.schema.replies import error_responses
from cllm.server.state import ServerState, State

if TYPE_CHECKING:
    from cllm.llm import AsyncLLM

router = APIRouter(prefix="/api", tags=["Ollama"])

_NEVER = "2318-01-01T00:00:00Z"
"""Models are not unloaded after a while; this is what Ollama says of those that stay."""


@router.get("/tags", responses=error_responses(OllamaError, 401))
async def tags(state: State) -> dict[str, Any]:
    """The available models."""
    loaded = dict(state.running())
    if state.several is not None:
        names = [served.name for served in state.several.models]
    else:
        assert state.one is not None
        names = [state.one.served_name]
    return {"models": [{**_listed(name, loaded.get(name)), "modified_at": _started(state)} for name in names]}


@router.get("/ps", responses=error_responses(OllamaError, 401))
async def running(state: State) -> dict[str, Any]:
    """The loaded models."""
    shown = {"expires_at": _NEVER, "size_vram": 0}
    return {
        "models": [{**_listed(name, llm), **shown, "context_length": llm.max_context} for name, llm in state.running()]
    }


@router.post("/show", responses=error_responses(OllamaError, 400, 401, 404, 409, 413))
async def show(body: Annotated[ShowRequest, Depends(ollama_body(ShowRequest))], state: State) -> dict[str, Any]:
    """A model's properties."""
    llm = state.loaded(body.shown).llm
    shape = llm.shape
    info = {
        "general.architecture": shape.architecture,
        f"{shape.architecture}.context_length": llm.max_context,
        f"{shape.architecture}.embedding_length": shape.n_embd,
        f"{shape.architecture}.block_count": shape.n_layers,
    }
    return {
        "template": llm.chat_template.source,
        "details": _details(llm),
        "model_info": info,
        "capabilities": _capabilities(llm),
        "modified_at": _started(state),
    }


@router.head("/version", include_in_schema=False)
@router.get("/version", responses=error_responses(OllamaError, 401))
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


def _listed(name: str, llm: AsyncLLM | None) -> dict[str, Any]:
    return {"name": name, "model": name, "size": 0, "digest": "", "details": _details(llm)}


def _details(llm: AsyncLLM | None) -> dict[str, Any]:
    family = llm.shape.architecture if llm is not None else ""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _capabilities(llm: AsyncLLM) -> list[str]:
    """In Ollama's words."""
    answers = llm.facts.no_answers is None
    has = {
        "completion": answers,
        "tools": answers,
        "insert": answers and llm.tokenizer.infill is not None,
        "thinking": answers and llm.dialect.marks is not None,
        "embedding": llm.embedder.no_embeddings is None,
    }
    return [name for name, there in has.items() if there]


def _started(state: ServerState) -> str:
    return datetime.fromtimestamp(state.created, timezone.utc).isoformat()
