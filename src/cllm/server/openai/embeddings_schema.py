"""Requests and replies of embeddings and reranking."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from cllm.server.schema.validation import (
    PROMPTS,
    WHOLE,
    AtMost,
    Int32,
    ModelName,
    MustBe,
    RequestModel,
    Text,
    Texts,
    Tokens,
    Unsupported,
    UserName,
    Words,
)

_INPUT = "A string, several strings, token ids, or several lists of token ids."


class _Asked(RequestModel):
    model: ModelName | None = Field(None, description="A name from GET /v1/models. Default: the one served.")
    user: UserName | None = Field(None, description="Ignored.")
    priority: Int32 | None = Field(None, description="Lower values run first. Default 0.")
    timeout: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Seconds after which the request fails, at most scheduler.request_timeout_s."
    )


class EmbeddingRequest(_Asked):
    model_config = ConfigDict(json_schema_extra={"example": {"input": ["the cat sat", "on the mat"]}})
    hints: ClassVar[frozenset[str]] = frozenset({"metadata", "request_id", "truncation_side"})
    unsupported: ClassVar[Unsupported] = {
        "add_special_tokens": (True,),
        "cache_salt": (),
        "embd_normalize": (2,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "input_type": (),
        "messages": (),
        "mm_processor_kwargs": (),
        "truncate_prompt_tokens": (),
        "use_activation": (True,),
    }

    input: Annotated[
        Words
        | Annotated[Texts, Field(min_length=1), AtMost("max_inputs", "texts", str)]
        | Tokens
        | Annotated[list[Tokens], Field(fail_fast=True, min_length=1), AtMost("max_inputs", "texts", list)],
        PROMPTS,
    ] = Field(description=_INPUT)
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of little-endian float32. Default float."
    )
    dimensions: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = Field(
        None, description="Keep only this many of the first dimensions, renormalised."
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
        list[Annotated[Text | Document, MustBe("a string or an object with a text")]],
        Field(fail_fast=True, min_length=1),
        AtMost("max_inputs", "documents"),
    ] = Field(description="Texts, or objects with a `text`.")
    top_n: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = Field(
        None, description="Return only this many of the best. Default: all."
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
