"""Ollama's embeddings: `/api/embed`, and `/api/embeddings`, which came before it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from cllm.server.http.response import SlicedJsonResponse, as_json, list_pieces, numbers_json, unless_gone
from cllm.server.inference.embedding import open_embedding
from cllm.server.inference.truncation import AS_MANY_AS_FIT, Truncation
from cllm.server.ollama.replies import OllamaError
from cllm.server.ollama.schema import OllamaEmbeddingsRequest, OllamaEmbedRequest
from cllm.server.schema.body import OllamaBody
from cllm.server.schema.replies import error_responses
from cllm.server.state import State
from cllm.tasks.embedding import shortened

if TYPE_CHECKING:
    from cllm.engine.reading import Embedding

router = APIRouter(prefix="/api", tags=["Ollama"])
_TO_CONTEXT = Truncation(AS_MANY_AS_FIT, "right")
_ERRORS = error_responses(OllamaError, 400, 401, 404, 408, 409, 413, 429, 500, 503)


@router.post("/embed", response_class=Response, responses=_ERRORS)
async def embed(body: OllamaBody[OllamaEmbedRequest], request: Request, state: State) -> Response:
    """Texts as vectors of length 1."""
    began = time.monotonic()
    model = await state.model(body.name, request)
    texts = body.texts
    cut = None if body.truncate is False else _TO_CONTEXT
    job = await open_embedding(request, model, texts, "ollama", dimensions=body.dimensions, truncation=cut)
    vectors = await unless_gone(request.receive, job.compute())
    end = {"total_duration": round((time.monotonic() - began) * 1e9), "load_duration": 0}
    end["prompt_eval_count"] = job.prompt_tokens
    return SlicedJsonResponse(_pieces(model.served_name, vectors, body.dimensions, end))


@router.post("/embeddings", response_class=Response, responses=_ERRORS)
async def embeddings(body: OllamaBody[OllamaEmbeddingsRequest], request: Request, state: State) -> Response:
    """One text as a vector of length 1."""
    model = await state.model(body.name, request)
    texts = [body.prompt] if body.prompt else []
    job = await open_embedding(request, model, texts, "ollama", param="prompt", truncation=_TO_CONTEXT)
    vectors = await unless_gone(request.receive, job.compute())
    return JSONResponse({"embedding": vectors[0].tolist() if vectors else []})


def _pieces(name: str, vectors: Sequence[Embedding], dimensions: int | None, end: dict[str, int]) -> Iterator[str]:
    yield f'{{"model":{as_json(name)},"embeddings":'
    yield from list_pieces((numbers_json(shortened(vector, dimensions).tolist()) for vector in vectors), entries=1)
    yield f",{as_json(end)[1:]}"
