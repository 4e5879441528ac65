"""Requests and replies of embeddings and reranking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from cllm.server.inference.embedding import Input
from cllm.server.inference.truncation import Truncation
from cllm.server.schema.messages import Messages
from cllm.server.schema.validation import (
    TOKEN_ID,
    WHOLE,
    AtMost,
    Int32,
    ModelName,
    MustBe,
    RequestModel,
    Text,
    Tokens,
    Unsupported,
    UserName,
    Words,
    refusal,
)

_INPUT = "A string, token ids, a list of token ids and strings, which are one text, or several of these."
_CHAT = "Only with messages. "
_OF_CHATS: dict[str, Any] = {
    "add_generation_prompt": {"enum": [None, False]},
    "continue_final_message": {"enum": [None, False]},
    "chat_template_kwargs": {"maxProperties": 0},
}
"""Parameters that only `messages` can have, and their values without effect, as a schema."""
_OF_DOCUMENTS: dict[str, Any] = {"return_documents": {"enum": [None, False]}}
_OF_TEXTS: dict[str, Any] = {"return_text": {"enum": [None, False]}}


def _only(name: str, other: str, without: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """For the API's description: this one is given, and the other is not."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}, other: {"type": "null"}, **without}}


_Part = Annotated[int, Field(ge=0, lt=2**31, json_schema_extra={TOKEN_ID: True})] | Text


def _kind(given: Any) -> str | None:
    """A list with token ids in it is one text."""
    if not isinstance(given, list):
        return "a text" if isinstance(given, str) else None
    if not any(isinstance(part, int | float) for part in given):
        return "several texts"
    return "a text in parts" if any(isinstance(part, str) for part in given) else "token ids"


def _kind_of_one(given: Any) -> str | None:
    kind = _kind(given)
    return "token ids" if kind == "several texts" else kind


_One = (
    Annotated[Words, Tag("a text")]
    | Annotated[Tokens, Tag("token ids")]
    | Annotated[list[_Part], Field(fail_fast=True, min_length=1), Tag("a text in parts")]
)
_Several = Annotated[
    list[Annotated[_One, Discriminator(_kind_of_one)]],
    Field(fail_fast=True, json_schema_extra={"minItems": 1}),
    AtMost("max_inputs", "texts"),
]
_INPUTS = MustBe("a string, a list of token ids and strings, or a list of several of these")


class _Asked(RequestModel):
    model: ModelName | None = Field(None, description="A name from GET /v1/models. Default: the one served.")
    user: UserName | None = Field(None, description="Ignored.")
    priority: Int32 | None = Field(None, description="Lower values run first. Default 0.")
    timeout: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Seconds after which the request fails, at most scheduler.request_timeout_s."
    )


class EmbeddingRequest(_Asked):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {"input": ["the cat sat", "on the mat"]},
            "oneOf": [_only("input", "messages", _OF_CHATS), _only("messages", "input")],
        }
    )
    hints = frozenset({"metadata", "request_id"})
    unsupported: ClassVar[Unsupported] = {
        **dict.fromkeys(("cache_salt", "chat_template", "input_type", "media_io_kwargs", "mm_processor_kwargs"), ()),
        "add_special_tokens": (True,), "use_activation": (True,), "embd_normalize": (2,),
        "embed_dtype": ("float32",), "endianness": ("native", "little"),
    }  # fmt: skip

    input: Annotated[_One | Annotated[_Several, Tag("several texts")], Discriminator(_kind), _INPUTS] | None = Field(
        None, description=_INPUT
    )
    messages: Messages | None = Field(
        None, description="A chat to embed, as POST /v1/chat/completions takes it, instead of input."
    )
    add_generation_prompt: bool | None = Field(
        None, description=_CHAT + "End the text so that the model would answer. Default false."
    )
    continue_final_message: bool | None = Field(
        None, description=_CHAT + "End the text within the last message, which must be the assistant's."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=_CHAT + "Arguments for the chat template.")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = Field(
        None, description="Cut texts to this many tokens; -1: to the context. Default: refuse those that are too long."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="With truncate_prompt_tokens: right keeps the first tokens, left the last. Default right."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of little-endian float32. Default float."
    )
    dimensions: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = Field(
        None, description="Keep only this many of the first dimensions, renormalised."
    )

    def contradictions(self) -> Iterator[PydanticCustomError]:
        if self.input == []:
            yield refusal("input", "is empty")
        if self.input is None and self.messages is None:
            yield refusal("input", "is missing: send input or messages")
        if self.input is not None and self.messages is not None:
            yield refusal("messages", "is not allowed together with input")
        for name in _OF_CHATS:
            if getattr(self, name) and self.messages is None:
                yield refusal(name, "is only allowed together with messages")
        if self.continue_final_message and self.add_generation_prompt:
            yield refusal("add_generation_prompt", "must be false where continue_final_message is true")

    @property
    def inputs(self) -> list[Input]:
        given: Any = self.input
        if isinstance(given, str):
            return [given]
        return [given] if any(isinstance(part, int) for part in given) else given

    @property
    def truncation(self) -> Truncation | None:
        most = self.truncate_prompt_tokens
        return None if most is None else Truncation(most, self.truncation_side or "right")


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
        json_schema_extra={
            "example": {"query": "Who sat on the mat?", "documents": ["the cat", "the dog"]},
            "oneOf": [_only("documents", "texts", _OF_TEXTS), _only("texts", "documents", _OF_DOCUMENTS)],
        }
    )
    unsupported: ClassVar[Unsupported] = {
        **dict.fromkeys(("max_chunks_per_doc", "max_tokens_per_doc", "rank_fields"), ()),
        **dict.fromkeys(("raw_scores", "truncate"), (False,)),
    }

    query: Text
    documents: (
        Annotated[
            list[Annotated[Text | Document, MustBe("a string or an object with a text")]],
            Field(fail_fast=True, min_length=1),
            AtMost("max_inputs", "documents"),
        ]
        | None
    ) = Field(None, description="Texts, or objects with a `text`.")
    texts: Annotated[list[Text], Field(fail_fast=True, min_length=1), AtMost("max_inputs", "texts")] | None = Field(
        None, description="The same as in Text Embeddings Inference, whose answer is a list of `index` and `score`."
    )
    top_n: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = Field(
        None, description="Return only this many of the best. Default: all."
    )
    return_documents: bool | None = Field(None, description="Whether documents are part of the answer. Default true.")
    return_text: bool | None = Field(
        None, description="With texts: whether these are part of the answer. Default false."
    )

    def contradictions(self) -> Iterator[PydanticCustomError]:
        if self.documents is None and self.texts is None:
            yield refusal("documents", "is missing: send documents or texts")
        if self.documents is not None and self.texts is not None:
            yield refusal("texts", "is not allowed together with documents")
        for name, needs in (("return_documents", "documents"), ("return_text", "texts")):
            if getattr(self, name) and getattr(self, needs) is None:
                yield refusal(name, f"is only allowed together with {needs}")

    @property
    def contents(self) -> list[str]:
        return self.texts or [each if isinstance(each, str) else each.text for each in self.documents or ()]


class RankedDocument(BaseModel):
    text: str


class Ranked(BaseModel):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RankedText(BaseModel):
    """As in Text Embeddings Inference."""

    index: int
    score: float
    text: str | None = Field(None, description="Only with return_text.")


class RerankReply(BaseModel):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[Ranked]
