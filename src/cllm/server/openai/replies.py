"""OpenAI's replies as models, for the API's description and the smaller replies."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cllm.server.schema.replies import COMPUTED_TOKENS, KNOWN_TOKENS, KVGroup


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Prompt tokens found in the KV cache.")
    known_tokens: int | None = Field(None, description=KNOWN_TOKENS)
    computed_tokens: int | None = Field(None, description=COMPUTED_TOKENS)


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for the first token of an echoed prompt.")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int = Field(description="Among all tokens; 1 is the likeliest.")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
_PROMPT_LOGPROBS = "By token id, of each token of the prompt; only with prompt_logprobs. null for the first one."


_TOKEN_IDS = "All tokens of the answer, with the one that ended it; only with return_token_ids."
_PROMPT_IDS = "The prompt's tokens; only with return_token_ids."


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None = Field(description="`stop` or `length`.")
    stop_reason: str | int | None = Field(description="The stop string or token id that ended the answer.")
    token_ids: list[int] | None = Field(None, description=_TOKEN_IDS)
    prompt_token_ids: list[int] | None = Field(None, description=_PROMPT_IDS)
    prompt_logprobs: PromptLogprobs | None = Field(None, description=_PROMPT_LOGPROBS)


class CompletionReply(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="The text of a JSON object; cut off where finish_reason is `length`.")


class ReplyToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ReplyMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="null where there are tool calls and no text.")
    reasoning_content: str | None = Field(None, description="The model's reasoning; left out where there is none.")
    tool_calls: list[ReplyToolCall] | None = Field(None, description="Left out where there are none.")
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None = Field(description="`stop`, `length` or `tool_calls`.")
    stop_reason: str | int | None = Field(description="The stop string or token id that ended the answer.")
    token_ids: list[int] | None = Field(None, description=_TOKEN_IDS)


class ChatReply(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = Field(None, description=_PROMPT_IDS)
    prompt_logprobs: PromptLogprobs | None = Field(None, description=_PROMPT_LOGPROBS)


class ModelCard(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cllm"
    max_model_len: int = Field(description="Maximum number of prompt and answer tokens together.")


class ServedCard(ModelCard):
    """One of several models. Some fields are null except for the operator's key."""

    aliases: list[str] = Field(description="Other names it goes by.")
    state: str = Field(description="`unloaded`, `loading`, `ready`, `unloading` or `failed`.")
    error: str | None = Field(description="Why it could not be loaded; for the operator.")
    pinned: bool = Field(description="Once it is loaded it stays.")
    requests: int | None = Field(description="Requests that use it now; for the operator.")
    weights_bytes: int
    kv_bytes: int | None = Field(description="K/V memory that it may have now; for the operator.")
    kv_bytes_per_token: int = Field(description="Of the first group.")
    kv_groups: list[KVGroup]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ServedCard | ModelCard]


class ServedList(ModelList):
    """If there are several models."""

    memory_budget_bytes: int = Field(description="Most that weights and K/V of all take together.")
