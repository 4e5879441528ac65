"""The one path of all APIs that embed texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

from cllm.engine.submission import Submission
from cllm.errors import InvalidRequestError
from cllm.loading.embedder import EMBEDDING
from cllm.server.http.response import Turns
from cllm.server.inference.streams import sent_by
from cllm.tasks.embedding import EmbeddingJob
from cllm.text.tokenizer import TokenLimit

if TYPE_CHECKING:
    from fastapi import Request

    from cllm.server.inference.truncation import Truncation
    from cllm.server.state import ModelState

Input = str | list[int] | list[int | str]
"""A text, its tokens, or tokens and texts in turn."""
_PARTS = 32
"""Texts that are tokenised before others get their turn."""


async def open_embedding(
    request: Request,
    model: ModelState,
    inputs: Sequence[Input],
    prefix: str,
    *,
    param: str = "input",
    dimensions: int | None = None,
    truncation: Truncation | None = None,
    priority: int | None = None,
    timeout: float | None = None,
) -> EmbeddingJob:
    """Check and tokenise texts. Everything that can be refused is refused here."""
    check_embedding(model, dimensions)
    cut = None if truncation is None else truncation.checked(model.llm, EMBEDDING)
    plain = [each if _is_plain(each) else await _joined(model, each, param) for each in inputs]
    texts = await model.encoder.encode_inputs(plain, param, cut)
    return embedding_job(request, model, texts, prefix, priority=priority, timeout=timeout)


def check_embedding(model: ModelState, dimensions: int | None) -> None:
    """Whether the model makes embeddings, of so many dimensions."""
    if (reason := model.llm.text.embedder.no_embeddings) is not None:
        raise InvalidRequestError(reason, "model")
    size = model.llm.text.spec.n_embd
    if dimensions is not None and dimensions > size:
        raise InvalidRequestError(f"dimensions is {dimensions}; embeddings of this model have {size}", "dimensions")


def _is_plain(given: Input) -> TypeGuard[str | list[int]]:
    return isinstance(given, str) or not any(isinstance(part, str) for part in given)


async def _joined(model: ModelState, parts: Sequence[int | str], param: str) -> list[int]:
    """The tokens of a text that is given as tokens and texts. What the model expects around a text goes around one."""
    encoder, embedder, ids = model.encoder, model.llm.text.embedder, list[int]()
    limit = TokenLimit(most := model.config.server.max_encode_tokens, f"at most {most} are read", "a text")
    turns = Turns()
    for number, part in enumerate(parts):
        if isinstance(part, str):
            ids += await encoder.encode(part, limit, param, add_bos=number == 0)
            if number % _PARTS == 0:
                await turns.give()
        else:
            ids.append(part)
    return [*ids, *embedder.text_end] if isinstance(parts[-1], str) else ids


def embedding_job(
    request: Request,
    model: ModelState,
    texts: Sequence[Sequence[int]],
    prefix: str,
    *,
    priority: int | None,
    timeout: float | None,
) -> EmbeddingJob:
    """A job for texts that are tokenised already. Its id begins with `prefix`."""
    name = f"{prefix}-{request.state.unique_id}"
    asked = [Submission(text, EMBEDDING, embeds=True) for text in texts]
    return EmbeddingJob(model.llm, sent_by(request, model, asked, name, priority=priority, timeout=timeout), name)
