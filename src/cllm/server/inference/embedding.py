"""The one path of all APIs that embed texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cllm.errors import InvalidRequestError
from cllm.server.state import tenant_of, time_left
from cllm.tasks.embedding import EmbeddingJob

if TYPE_CHECKING:
    from fastapi import Request

    from cllm.server.state import ModelState


async def open_embedding(
    request: Request,
    model: ModelState,
    inputs: Sequence[str | list[int]],
    prefix: str,
    *,
    param: str = "input",
    dimensions: int | None = None,
    truncate: bool = False,
    priority: int | None = None,
    timeout: float | None = None,
) -> EmbeddingJob:
    """Check and tokenise texts, given as text or as tokens. Everything that can be refused is refused here. `truncate`:
    cut those that are longer than the context."""
    if (reason := model.llm.embedder.no_embeddings) is not None:
        raise InvalidRequestError(reason, "model")
    size = model.llm.shape.n_embd
    if dimensions is not None and dimensions > size:
        raise InvalidRequestError(f"dimensions is {dimensions}; embeddings of this model have {size}", "dimensions")
    texts = await model.encoder.encode_inputs(inputs, param, truncate=truncate)
    return embedding_job(request, model, texts, prefix, priority=priority, timeout=timeout)


def embedding_job(
    request: Request,
    model: ModelState,
    texts: Sequence[Sequence[int]],
    prefix: str,
    *,
    priority: int | None,
    timeout: float | None,
) -> EmbeddingJob:
    """Of texts that are tokenised already. Its id begins with `prefix`."""
    return EmbeddingJob(
        model.llm,
        texts,
        request_id=f"{prefix}-{request.state.unique_id}",
        priority=priority or 0,
        timeout_s=time_left(request, model, timeout),
        tenant=tenant_of(request),
    )
