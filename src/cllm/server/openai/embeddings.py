"""OpenAI's embeddings endpoint, and reranking as in Jina's, Cohere's and vLLM's APIs."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from fastapi import APIRouter, Request, Response

from cllm.errors import InvalidRequestError
from cllm.loading.embedder import EMBEDDING
from cllm.server.http.response import SlicedJsonResponse, as_json, list_pieces, numbers_json, text_pieces, unless_gone
from cllm.server.inference.embedding import check_embedding, embedding_job, open_embedding
from cllm.server.openai.embeddings_schema import (
    EmbeddingReply,
    EmbeddingRequest,
    RankedText,
    RerankReply,
    RerankRequest,
)
from cllm.server.schema.body import JsonBody
from cllm.server.schema.replies import ErrorReply, error_responses
from cllm.server.state import State
from cllm.tasks.embedding import EmbeddingJob, shortened
from cllm.text.chat_template import PromptOptions

if TYPE_CHECKING:
    from cllm.engine.reading import Embedding
    from cllm.server.state import ModelState

router = APIRouter(tags=["OpenAI"])
_ERRORS = error_responses(ErrorReply, 400, 401, 404, 408, 413, 429, 500, 503)


@router.post("/v1/embeddings", response_model=EmbeddingReply, responses=_ERRORS)
async def embeddings(body: JsonBody[EmbeddingRequest], request: Request, state: State) -> Response:
    """Texts as vectors of length 1."""
    model = await state.model(body.model, request, body.timeout)
    work = await _open(body, request, model)
    vectors = await unless_gone(request.receive, work.compute())
    return SlicedJsonResponse(_pieces(body, model.served_name, vectors, work.prompt_tokens))


@router.post("/v1/rerank", response_model=RerankReply | list[RankedText], responses=_ERRORS)
async def rerank(body: JsonBody[RerankRequest], request: Request, state: State) -> Response:
    """How well each document answers a query, best first. With `texts`: a list, as in Text Embeddings Inference."""
    model = await state.model(body.model, request, body.timeout)
    if (reason := model.llm.text.embedder.no_ranking) is not None:
        raise InvalidRequestError(reason, "model")
    documents = body.contents
    texts = await model.encoder.encode_pairs(body.query, documents)
    work = embedding_job(request, model, texts, "rerank", priority=body.priority, timeout=body.timeout)
    vectors = await unless_gone(request.receive, work.compute())
    scores = [float(vector[0]) for vector in vectors]
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n]
    if body.texts is not None:
        return SlicedJsonResponse(_ranked_texts(best, scores, documents if body.return_text else None))
    head = f"rerank-{request.state.unique_id}", model.served_name
    shown = documents if body.return_documents is not False else None
    return SlicedJsonResponse(_rerank_pieces(head, best, scores, shown, work.prompt_tokens))


async def _open(body: EmbeddingRequest, request: Request, model: ModelState) -> EmbeddingJob:
    if body.messages is None:
        return await open_embedding(
            request,
            model,
            body.inputs,
            "embd",
            dimensions=body.dimensions,
            truncation=body.truncation,
            priority=body.priority,
            timeout=body.timeout,
        )
    check_embedding(model, body.dimensions)
    cut = None if body.truncation is None else body.truncation.checked(model.llm, EMBEDDING)
    limit = model.llm.text.prompt_limit(EMBEDDING) if cut is None else cut.reading_limit(model.config)
    options = PromptOptions(
        arguments=body.chat_template_kwargs or {},
        asks=bool(body.add_generation_prompt),
        continues=bool(body.continue_final_message),
    )
    messages = [message.plain() for message in body.messages]
    ids = await model.encoder.encode_chat_within(messages, options, limit)
    texts = [ids if cut is None else cut.cut(ids)]
    return embedding_job(request, model, texts, "embd", priority=body.priority, timeout=body.timeout)


def _pieces(body: EmbeddingRequest, name: str, vectors: Sequence[Embedding], tokens: int) -> Iterator[str]:
    """An `EmbeddingReply`."""
    yield '{"object":"list","data":'
    written = (_written(index, shortened(vector, body.dimensions), body) for index, vector in enumerate(vectors))
    yield from list_pieces(written, entries=1)
    yield f',"model":{as_json(name)},"usage":{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}}}'


def _written(index: int, vector: Embedding, body: EmbeddingRequest) -> str:
    if body.encoding_format == "base64":
        shown = as_json(base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode())
    else:
        shown = numbers_json(vector.tolist())
    return f'{{"object":"embedding","index":{index},"embedding":{shown}}}'


def _ranked_texts(best: Sequence[int], scores: Sequence[float], texts: Sequence[str] | None) -> Iterator[str]:
    """A list of `RankedText`."""
    start = "["
    for index in best:
        yield f'{start}{{"index":{index},"score":{scores[index]!r}'
        if texts is not None:
            yield ',"text":'
            yield from text_pieces(texts[index])
        yield "}"
        start = ","
    yield "]"


def _rerank_pieces(
    head: tuple[str, str], best: Sequence[int], scores: Sequence[float], documents: Sequence[str] | None, tokens: int
) -> Iterator[str]:
    """A `RerankReply`."""
    yield f'{{"id":{as_json(head[0])},"model":{as_json(head[1])},'
    yield f'"usage":{{"prompt_tokens":{tokens},"total_tokens":{tokens}}},"results":['
    for place, index in enumerate(best):
        yield f'{"," if place else ""}{{"index":{index},"relevance_score":{scores[index]!r}'
        if documents is not None:
            yield ',"document":{"text":'
            yield from text_pieces(documents[index])
            yield "}"
        yield "}"
    yield "]}"
