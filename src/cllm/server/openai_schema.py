"""What OpenAI's clients may send. What this server does not have is listed and refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from cllm.engine.params import MAX_LOGPROBS
from cllm.server.cache_control import MOST_MARKS, CacheControl, count_marks
from cllm.server.sampling_schema import SamplingFields, in_range
from cllm.server.validation import (
    WHOLE,
    AtMost,
    Int32,
    RequestModel,
    Text,
    Texts,
    TokenIds,
    Unsupported,
    Words,
    refusal,
)

ModelName = Annotated[Text, Field(max_length=512)]
Tokens = Annotated[TokenIds, Field(json_schema_extra={"minItems": 1})]
UserName = Annotated[Text, Field(max_length=256)]

_PROMPT = "A string, several strings, token ids, or several lists of token ids."


class StreamOptions(RequestModel):
    unsupported: ClassVar[Unsupported] = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(None, description="End the stream with an event that holds the usage.")


def _together(name: str, needs: str) -> dict[str, Any]:
    """In the API's description: `name` may only be given where `needs` is true."""
    given = {"properties": {needs: {"const": True}}, "required": [needs]}
    return {"anyOf": [{"properties": {name: {"type": "null"}}}, given]}


class OpenAIRequest(SamplingFields):
    model: ModelName | None = Field(None, description="A name from GET /v1/models. Default: the one served.")
    n: Annotated[Int32, in_range("n")] | None = Field(None, description="Number of answers to each prompt. Default 1.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    stream_options: StreamOptions | None = None
    user: UserName | None = Field(None, description="Who asks; goes into the log next to the request id.")
    prompt_logprobs: Annotated[Int32, in_range("prompt_logprobs")] | None = Field(
        None, description="Log probabilities of the prompt's tokens, and of so many likeliest ones in their places."
    )

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> OpenAIRequest:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "is only allowed together with stream = true")
        return self

    @property
    def asker(self) -> str | None:
        return self.user

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(OpenAIRequest):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
            "allOf": [_together("stream_options", "stream")],
        }
    )
    unsupported: ClassVar[Unsupported] = {"suffix": ("",)}

    prompt: (
        Words
        | Annotated[Texts, Field(json_schema_extra={"minItems": 1}), AtMost("max_prompts", "prompts", str)]
        | Tokens
        | Annotated[
            list[Tokens],
            Field(fail_fast=True, json_schema_extra={"minItems": 1}),
            AtMost("max_prompts", "prompts", list),
        ]
    ) = Field(description=_PROMPT)
    max_tokens: Annotated[Int32, in_range("max_tokens")] | None = Field(
        None, description="Most tokens to generate. Default 16. With 0, only the prompt is computed."
    )
    echo: bool | None = Field(
        None, description="Put the prompt in front of the answer, and with logprobs those of its tokens, too."
    )
    logprobs: Annotated[Int32, in_range("logprobs")] | None = Field(
        None, description="Log probabilities of so many likeliest tokens, 0 to 20."
    )
    best_of: Int32 | None = Field(None, description="Not supported: must equal n if given.")

    @model_validator(mode="after")
    def _supported_together(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise refusal("best_of", "is not supported by this server; leave it out")
        return self


class TextPart(RequestModel):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = Field(None, description="Keep the K/V of all up to here for a while.")

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        """Before the keys are looked at: those of a picture would be called unknown."""
        if isinstance(data, dict) and isinstance(kind := data.get("type", "text"), str) and kind != "text":
            raise refusal("type", f"must be 'text', not {kind[:40]!r}; this server takes no other parts")
        return data


class ChatMessage(RequestModel):
    unsupported: ClassVar[Unsupported] = {
        "name": (),
        "tool_calls": ([],),
        "tool_call_id": (),
        "function_call": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
        "reasoning_content": (),
    }

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="`developer` is another word for `system`."
    )
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] = Field(
        description="Text, or parts of type `text`, joined by newlines."
    )
    cache_control: CacheControl | None = Field(None, description="Keep the K/V of all up to here for a while.")

    def plain(self) -> dict[str, str]:
        """The message in the form that chat templates know."""
        role = "system" if self.role == "developer" else self.role
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return {"role": role, "content": text}


class ChatRequest(OpenAIRequest):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "max_completion_tokens": 64,
            },
            "allOf": [_together("stream_options", "stream"), _together("top_logprobs", "logprobs")],
        }
    )
    unsupported: ClassVar[Unsupported] = {
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (True,),
        "functions": ([],),
        "function_call": ("none",),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "moderation": (),
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
        "prompt_cache_key": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
    }

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1), AtMost("max_messages", "messages")]
    max_tokens: Annotated[Int32, in_range("max_tokens")] | None = Field(
        None, description="The old name of max_completion_tokens."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = Field(
        None, description="Most tokens to generate. Default: as many as the context holds."
    )
    logprobs: bool | None = Field(None, description="Report the log probability of every token.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="And of so many likeliest ones."
    )
    safety_identifier: UserName | None = Field(None, description="The new name of user.")

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            reason = "is only allowed together with logprobs = true"
            raise refusal("top_logprobs", reason)
        names = (self.max_tokens, self.max_completion_tokens)
        if None not in names and names[0] != names[1]:
            reason = f"is {names[0]}, but max_completion_tokens is {names[1]}; send one of them"
            raise refusal("max_tokens", reason)
        if (count := count_marks(self)) > MOST_MARKS:
            raise refusal("messages", f"holds {count} marks of cache_control; at most {MOST_MARKS} are allowed")
        return self

    @property
    def asker(self) -> str | None:
        return self.user or self.safety_identifier

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
