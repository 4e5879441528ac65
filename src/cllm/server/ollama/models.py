"""What Ollama's clients ask about models: `/api/tags`, `/api/ps`, `/api/show`, `/api/pull` and `/api/version`."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from cllm import __version__
from cllm.errors import ModelError
from cllm.loading.weights_id import weights_id
from cllm.server.http.response import as_json
from cllm.server.ollama.render import LineStream
from cllm.server.ollama.replies import OllamaError
from cllm.server.ollama.schema import PullRequest, ShowRequest
from cllm.server.schema.body import OllamaBody
from cllm.server.schema.replies import error_responses
from cllm.server.state import ServerState, State

if TYPE_CHECKING:
    from cllm.llm import AsyncLLM
    from cllm.loading.disk_cache import ModelFiles

router = APIRouter(prefix="/api", tags=["Ollama"])

_NEVER = "2318-01-01T00:00:00Z"
"""Models are not unloaded after a while; this is what Ollama says of those that stay."""


@router.get("/tags", responses=error_responses(OllamaError, 401))
async def tags(state: State) -> dict[str, Any]:
    """The available models."""
    loaded = dict(state.running())
    files = {served.name: served.estimate.files for served in state.serves.models}
    listed = [await _listed(name, loaded.get(name), of_it) for name, of_it in files.items()]
    return {"models": [{**each, "modified_at": _started(state)} for each in listed]}


@router.get("/ps", responses=error_responses(OllamaError, 401))
async def running(state: State) -> dict[str, Any]:
    """The loaded models."""
    shown = {"expires_at": _NEVER, "size_vram": 0}
    return {
        "models": [
            {**await _listed(name, llm), **shown, "context_length": llm.text.max_context}
            for name, llm in state.running()
        ]
    }


@router.post("/show", responses=error_responses(OllamaError, 400, 401, 404, 409, 413))
async def show(body: OllamaBody[ShowRequest], state: State) -> dict[str, Any]:
    """A model's properties."""
    llm = state.loaded(body.shown).llm
    spec = llm.text.spec
    info = {
        "general.architecture": spec.architecture,
        f"{spec.architecture}.context_length": llm.text.max_context,
        f"{spec.architecture}.embedding_length": spec.n_embd,
        f"{spec.architecture}.block_count": spec.n_layers,
    }
    return {
        "template": llm.text.chat_template.source,
        "details": _details(llm),
        "model_info": info,
        "capabilities": _capabilities(llm),
        "modified_at": _started(state),
    }


@router.post("/pull", response_class=Response, responses=error_responses(OllamaError, 400, 401, 404, 413))
async def pull(body: OllamaBody[PullRequest], state: State) -> Response:
    """Nothing to do for a model that is served. Others are not downloaded."""
    state.find(body.shown)
    if body.stream is False:
        return JSONResponse({"status": "success"})
    lines = "".join(as_json({"status": status}) + "\n" for status in ("pulling manifest", "success"))
    return Response(lines, media_type=LineStream.media_type)


@router.head("/version", include_in_schema=False)
@router.get("/version", responses=error_responses(OllamaError, 401))
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


async def _listed(name: str, llm: AsyncLLM | None, files: ModelFiles | None = None) -> dict[str, Any]:
    """`files`: of a model that may not be loaded."""
    size, weights = 0, ""
    if llm is not None:
        size, weights = llm.text.facts.file_bytes, llm.text.facts.weights
    elif files is not None:
        size, weights = files.size, await asyncio.to_thread(_weights_of, files)
    digest = sha256(weights.encode()).hexdigest() if weights else ""
    return {"name": name, "model": name, "size": size, "digest": digest, "details": _details(llm)}


@lru_cache(maxsize=1024)
def _weights_of(files: ModelFiles) -> str:
    try:
        return weights_id(files.paths)
    except ModelError:
        return ""


def _details(llm: AsyncLLM | None) -> dict[str, Any]:
    family = llm.text.spec.architecture if llm is not None else ""
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
    answers = llm.text.facts.traits.no_answers is None
    has = {
        "completion": answers,
        "tools": answers,
        "insert": answers and llm.text.tokenizer.infill is not None,
        "thinking": answers and llm.text.dialect.marks is not None,
        "embedding": llm.text.embedder.no_embeddings is None,
    }
    return [name for name, there in has.items() if there]


def _started(state: ServerState) -> str:
    return datetime.fromtimestamp(state.created, timezone.utc).isoformat()
