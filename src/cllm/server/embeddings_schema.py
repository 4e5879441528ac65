"""What may be asked of embeddings and of reranking, and what comes back."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from cllm.server.openai_schema import ModelName, Tokens, UserName
from cllm.server.validation import WHOLE, AtMost, Int32, RequestModel, Text, Texts, Unsupported, Words

_INPUT = "A string, several strings, token ids, or several lists of token ids."


class _Asked(RequestModel):
    model: ModelName | None = Field(None, description="A name from GET /v1/models. Default: the one served.")
    user: UserName | None = Field(None, description="Who asks; changes nothing.")
    priority: Int32 | None = Field(None, description="Lower goes first. Default 0.")
    timeout: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Seconds after which the request fails; scheduler.request_timeout_s is the most."
    )


class EmbeddingRequest(_Asked):
    model_config = ConfigDict(json_schema_extra={"example": {"input": ["the cat sat", "on the mat"]}})

    input: (
        Words
        | Annotated[Texts, Field(min_length=1), AtMost("max_inputs", "texts", str)]
        | Tokens
        | Annotated[list[Tokens], Field(fail_fast=True, min_length=1), AtMost("max_inputs", "texts", list)]
    ) = Field(description=_INPUT)
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of little-endian float32. Default float."
    )
    dimensions: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = Field(
        None, description="Only so many of the first dimensions, as a vector of length 1."
    )


class Embedded(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedded]
    model: str
    usage: EmbeddingUsage


class Document(RequestModel):
    text: Text


class RerankRequest(_Asked):
    model_config = ConfigDict(
        json_schema_extra={"example": {"query": "Who sat on the mat?", "documents": ["the cat", "the dog"]}}
    )
    unsupported: ClassVar[Unsupported] = {"max_chunks_per_doc": (), "max_tokens_per_doc": (), "rank_fields": ()}

    query: Text
    documents: Annotated[
        list[Text | Document], Field(fail_fast=True, min_length=1), AtMost("max_inputs", "documents")
    ] = Field(description="Texts, or objects with a `text`.")
    top_n: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = Field(
        None, description="Only so many of the best. Default: all."
    )
    return_documents: bool | None = Field(None, description="Whether documents are part of the answer. Default true.")


class RankedDocument(BaseModel):
    text: str


class Ranked(BaseModel):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankReply(BaseModel):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[Ranked]
